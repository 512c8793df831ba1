"""What the device could do: measured rates, the encoder's floating-point operations, and the time that follows.

Operations are those of the stock modules on the real rows of a batch: linear layers, the patch embedding and attention
between the rows of each sequence, two operations a multiply-add. Padding, norms, activations and rotary positions count
nothing, so time spent on them shows as distance from the limit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.timing import measure
from onereplay import geometry
from onereplay.adapters.base import Adapter
from onereplay.adapters.internvl import InternVL
from onereplay.adapters.lfm2_vl import Lfm2VL
from onereplay.adapters.qwen2_5_vl import Qwen25VL
from onereplay.geometry import Grid

PRODUCT_SIDE = 8192
COPY_BYTES = 2**30
CPU_PRODUCT_SIDE = 512
CPU_COPY_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class Roofline:
    """Rates measured in this process."""

    product_side: int
    """Of the square matrices that were multiplied."""
    dtype: str
    flops_per_second: float
    copied_bytes: int
    bytes_per_second: float
    """Read and written bytes of a copy on the device."""

    def limit_ms(self, flops: int, weight_bytes: int) -> float:
        """The time that neither products nor reading every weight once can beat."""
        return max(flops / self.flops_per_second, weight_bytes / self.bytes_per_second) * 1e3

    def __str__(self) -> str:
        return (
            f"{self.flops_per_second / 1e12:.3g} TFLOP/s ({self.product_side}^3 product, {self.dtype}), "
            f"{self.bytes_per_second / 1e9:,.0f} GB/s (copy of {self.copied_bytes / 2**20:,.0f} MiB, read and written)"
        )


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Multiply and copy, in sizes that fill a GPU, or in small ones on a CPU."""
    side, num_bytes = (PRODUCT_SIDE, COPY_BYTES) if device.type == "cuda" else (CPU_PRODUCT_SIDE, CPU_COPY_BYTES)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiplied = measure(lambda: torch.matmul(left, right, out=product), device, inside="one product", repeats=30)
    copied = measure(lambda: target.copy_(source), device, inside="one copy", repeats=30)
    return Roofline(
        product_side=side,
        dtype=str(dtype).removeprefix("torch."),
        flops_per_second=linear(side, side, side) / multiplied.best_ms.median * 1e3,
        copied_bytes=num_bytes,
        bytes_per_second=2 * num_bytes / copied.best_ms.median * 1e3,
    )


def weight_bytes(adapter: Adapter[Any]) -> int:
    """Bytes of the vision modules' parameters."""
    modules = [getattr(adapter.model, part) for part in adapter.parts]
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Operations
# ---------------------------------------------------------------------------------------------------------------------


def encoder_flops(adapter: Adapter[Any], grids: Sequence[Grid]) -> int:
    """Operations of tower and projector for these frames or tiles, from the model's configuration alone."""
    match adapter:
        case Qwen25VL():
            return _qwen2_5_vl(adapter, grids)
        case InternVL():
            return _internvl(adapter, grids)
        case Lfm2VL():
            return _lfm2_vl(adapter, grids)
    raise NotImplementedError(f"no count of operations for {adapter.model_type}; add it to {__name__}")


def linear(rows: int, inputs: int, outputs: int) -> int:
    """A linear layer: `(rows, inputs) @ (inputs, outputs)`."""
    return 2 * rows * inputs * outputs


def attention(lengths: Iterable[int], hidden: int) -> int:
    """Logits and weighted sum over all heads, for sequences of these lengths; `hidden` is heads times head size."""
    return 4 * hidden * sum(length * length for length in lengths)


def _qwen2_5_vl(adapter: Qwen25VL, grids: Sequence[Grid]) -> int:
    vision = adapter.config.vision_config
    rows, hidden = sum(grid.num_patches for grid in grids), vision.hidden_size
    merged, tokens = hidden * adapter.merge**2, rows // adapter.merge**2
    frames = [length for grid in grids for length in geometry.frame_lengths(grid).tolist()]
    windows = [
        length for grid in grids for length in geometry.window_lengths(grid, adapter.window, adapter.merge).tolist()
    ]
    full_layers = len(vision.fullatt_block_indexes)
    layer = linear(rows, hidden, 4 * hidden) + 3 * linear(rows, hidden, vision.intermediate_size)
    return int(
        linear(rows, adapter.pixel_shape[0], hidden)
        + vision.depth * layer
        + full_layers * attention(frames, hidden)
        + (vision.depth - full_layers) * attention(windows, hidden)
        + linear(tokens, merged, merged)
        + linear(tokens, merged, adapter.hidden_size)
    )


def _internvl(adapter: InternVL, grids: Sequence[Grid]) -> int:
    vision = adapter.config.vision_config
    hidden = vision.hidden_size
    patches = sum(grid.num_patches for grid in grids)
    lengths = [grid.num_patches + 1 for grid in grids]  # and the class token
    merge = round(1 / adapter.config.downsample_ratio)
    down, across = vision.patch_size
    tokens, merged = patches // merge**2, hidden * merge**2
    return int(
        linear(patches, vision.num_channels * down * across, hidden)
        + vision.num_hidden_layers * _plain_layer(sum(lengths), hidden, vision.intermediate_size)
        + vision.num_hidden_layers * attention(lengths, hidden)
        + linear(tokens, merged, adapter.hidden_size)
        + linear(tokens, adapter.hidden_size, adapter.hidden_size)
    )


def _lfm2_vl(adapter: Lfm2VL, grids: Sequence[Grid]) -> int:
    vision = adapter.config.vision_config
    hidden, projector = vision.hidden_size, adapter.config.projector_hidden_size
    lengths = [grid.num_patches for grid in grids]
    rows, tokens = sum(lengths), sum(lengths) // adapter.merge**2
    return int(
        linear(rows, adapter.patch_dim, hidden)
        + vision.num_hidden_layers * _plain_layer(rows, hidden, vision.intermediate_size)
        + vision.num_hidden_layers * attention(lengths, hidden)
        + linear(tokens, hidden * adapter.merge**2, projector)
        + linear(tokens, projector, adapter.hidden_size)
    )


def _plain_layer(rows: int, hidden: int, intermediate: int) -> int:
    """Query, key, value, output and an MLP of two products."""
    return linear(rows, hidden, 4 * hidden) + 2 * linear(rows, hidden, intermediate)
