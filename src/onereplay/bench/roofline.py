"""What the device could do: measured rates, an encoder's floating-point operations, and the time that follows.

Operations are counted by PyTorch's own counter while the adapter's `forward` runs once, eagerly, without rewrites, on
exactly the batch's rows: products, convolutions, attention between the rows of each sequence; two a multiply-add.
Padding, norms, activations and rotary positions count nothing, so time spent on them shows as distance from the limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from onereplay.adapters import adapter_for
from onereplay.adapters.base import Adapter
from onereplay.attention.ops import OPERATOR
from onereplay.bench.timing import measure
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.manager import EncoderCudaGraphManager

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
    return sum(weight.nbytes for weight in adapter.weights)


def encoder_flops(adapter: Adapter[Any], inputs: Mapping[str, Any]) -> int:
    """Operations of all paths for these inputs, as the module says; runs the model once."""
    plain = adapter_for(adapter.model, EncoderCudaGraphConfig(attention=adapter.attention, optimize=()))
    manager = EncoderCudaGraphManager(plain, EncoderCudaGraphConfig(optimize=()))
    counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
    with torch.compiler.set_stance("force_eager"), counter:
        manager.encode(plain.batch(**inputs))
    return int(counter.get_total_flops())


def linear(rows: int, inputs: int, outputs: int) -> int:
    """A linear layer: `(rows, inputs) @ (inputs, outputs)`."""
    return 2 * rows * inputs * outputs


def attention(lengths: Sequence[int], hidden: int) -> int:
    """Logits and weighted sum over all heads, for sequences of these lengths; `hidden` is heads times head size."""
    return 4 * hidden * sum(length * length for length in lengths)


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *_: Any, **__: Any) -> int:
    return attention(cu_seqlens.diff().tolist(), query.shape[1] * query.shape[2])


def _cpu_attention(query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
    batch, heads, rows, size = query.shape
    return 4 * batch * heads * rows * key.shape[2] * size


_UNCOUNTED: dict[Any, Any] = {
    OPERATOR: _varlen_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
}
"""Operators that PyTorch's counter has no formula for."""

for _formula in _UNCOUNTED.values():
    _formula._get_raw = True  # the counter then hands on tensors and not their shapes
