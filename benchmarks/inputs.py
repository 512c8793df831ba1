"""Batches of the benchmarks: shapes as integers, and tensors of those shapes as the models' processors return them.

Pixels are random numbers from a fixed seed, rounded to the encoder's dtype, so every way to run them sees equal values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, sqrt
from typing import Any

import torch
from torch import Tensor

from onereplay.adapters.base import Adapter
from onereplay.adapters.internvl import InternVL
from onereplay.adapters.lfm2_vl import Lfm2VL
from onereplay.adapters.qwen2_5_vl import Qwen25VL
from onereplay.geometry import Grid
from onereplay.presets import Preset

MIXES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "mix3": ((224, 224), (140, 336), (280, 308)),
    "mix8": (*((224, 224),) * 2, *((448, 448),) * 3, (476, 644), (280, 840), (896, 896)),
}
"""Mixed batches: height and width of each picture in pixels. Each model cuts them as its processor would."""

_OURS_ALONE = ("num_patches", "num_tiles")
"""Inputs that the stock methods do not take: they return tiles, not images."""
_MAX_TILES = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """One batch as integers."""

    name: str
    items: tuple[tuple[Grid, ...], ...]
    """For each item its frames or tiles, in patches."""

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Of all items, in order."""
        return tuple(grid for item in self.items for grid in item)


def shapes(adapter: Adapter[Any], preset: Preset, token_counts: Sequence[int]) -> list[Shape]:
    """The batches of one model: one for each count of tokens, and the mixed ones that are no larger than these.

    A model of tiles has no fewer tokens than one tile; counts that give the same batch are listed once.
    """
    sized = {shape.items: shape for shape in (_of_tokens(adapter, preset, count) for count in token_counts)}
    mixed = (Shape(name, tuple(_picture(adapter, preset, *sides) for sides in MIXES[name])) for name in MIXES)
    most = max(num_tokens(adapter, shape) for shape in sized.values())
    return [*sized.values(), *(shape for shape in mixed if num_tokens(adapter, shape) <= most)]


def num_tokens(adapter: Adapter[Any], shape: Shape) -> int:
    """Tokens of the batch."""
    match adapter:
        case InternVL():
            return adapter.tile_tokens * len(shape.grids)
        case Qwen25VL() | Lfm2VL():
            return sum(grid.num_patches for grid in shape.grids) // adapter.merge**2
    raise _no_inputs(adapter)


def _of_tokens(adapter: Adapter[Any], preset: Preset, tokens: int) -> Shape:
    """One picture, nearly square (Qwen2.5-VL); tiles, up to 12 a picture (InternVL); pictures of at most the
    processor's `max_image_tokens` (LFM2-VL)."""
    match adapter:
        case Qwen25VL():
            return Shape(f"{tokens:,}", ((_square(tokens, adapter.merge),),))
        case Lfm2VL():
            most = int(preset.processor["max_image_tokens"])
            return Shape(f"{tokens:,}", tuple((_square(n, adapter.merge),) for n in _portions(tokens, most)))
        case InternVL():
            tiles = max(1, tokens // adapter.tile_tokens)
            items = tuple((_tile(adapter),) * n for n in _portions(tiles, _MAX_TILES))
            return Shape(f"{tiles * adapter.tile_tokens:,}", items)
    raise _no_inputs(adapter)


def _picture(adapter: Adapter[Any], preset: Preset, height: int, width: int) -> tuple[Grid, ...]:
    """A picture of this many pixels, cut as the model's processor would."""
    match adapter:
        case Qwen25VL():
            patch = int(preset.processor["patch_size"])
            return (Grid(1, height // patch, width // patch),)
        case Lfm2VL():
            unit = int(preset.processor["encoder_patch_size"]) * adapter.merge
            return (_within(height / unit, width / unit, int(preset.processor["max_image_tokens"]), adapter.merge),)
        case InternVL():
            tiles = min(max(1, round(height / 448)) * max(1, round(width / 448)), _MAX_TILES)
            return (_tile(adapter),) * (tiles + (tiles > 1))  # more than one: a thumbnail too
    raise _no_inputs(adapter)


def _square(tokens: int, merge: int) -> Grid:
    """The grid of exactly this many tokens that is nearest to a square."""
    rows = next(side for side in range(isqrt(tokens), 0, -1) if tokens % side == 0)
    return Grid(1, rows * merge, tokens // rows * merge)


def _within(rows: float, columns: float, most: int, merge: int) -> Grid:
    """The grid of these proportions with at most `most` tokens."""
    shrink = min(1.0, sqrt(most / (rows * columns)))
    return Grid(1, max(1, int(rows * shrink)) * merge, max(1, int(columns * shrink)) * merge)


def _tile(adapter: InternVL) -> Grid:
    down, across = adapter.config.vision_config.patch_size
    return Grid(1, adapter.tile_shape[1] // down, adapter.tile_shape[2] // across)


def _portions(total: int, most: int) -> list[int]:
    full, rest = divmod(total, most)
    return [most] * full + [rest] * (rest > 0)


def _no_inputs(adapter: Adapter[Any]) -> NotImplementedError:
    return NotImplementedError(f"no benchmark inputs for {adapter.model_type}; add them to {__name__}")


# ---------------------------------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------------------------------

Inputs = dict[str, Any]


def processor_outputs(adapter: Adapter[Any], shape: Shape, dtype: torch.dtype) -> Inputs:
    """What the model's image processor would return for pictures of this shape: on the CPU, pixels in float32."""
    grids = shape.grids
    match adapter:
        case Qwen25VL():
            rows = sum(grid.num_patches for grid in grids)
            return {
                "pixel_values": _pixels(dtype, rows, *adapter.pixel_shape),
                "image_grid_thw": torch.tensor(grids, dtype=torch.int64),
            }
        case Lfm2VL():
            return _padded(grids, _pixels(dtype, len(grids), max(map(_patches, grids)), adapter.patch_dim), shape)
        case InternVL():
            tiles = _pixels(dtype, len(grids), *adapter.tile_shape)
            return {"pixel_values": tiles, "num_patches": [len(item) for item in shape.items]}
    raise _no_inputs(adapter)


def _padded(grids: Sequence[Grid], pixels: Tensor, shape: Shape) -> Inputs:
    lengths = torch.tensor([grid.num_patches for grid in grids])
    mask = torch.arange(pixels.shape[1]) < lengths[:, None]
    return {
        "pixel_values": pixels * mask[:, :, None],
        "spatial_shapes": torch.tensor([grid[1:] for grid in grids], dtype=torch.int64),
        "pixel_attention_mask": mask.to(torch.int32),
        "num_tiles": [len(item) for item in shape.items],
    }


def _patches(grid: Grid) -> int:
    return grid.num_patches


def _pixels(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).float()


def with_pixels_on(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """The same inputs with pixels on the device, in the encoder's dtype; everything else stays on the CPU."""
    return {**inputs, "pixel_values": inputs["pixel_values"].to(device, dtype)}


def for_stock_method(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """What `get_image_features` takes, all on the device: what `processor(...).to(device, dtype)` gives."""
    return {
        name: value.to(device, dtype) if name == "pixel_values" else value.to(device)
        for name, value in inputs.items()
        if name not in _OURS_ALONE
    }
