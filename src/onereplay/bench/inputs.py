"""Batches that a benchmark encodes: shapes as integers, and tensors of those shapes.

Workloads that others can repeat, from the model's configuration alone:

* `single`: the fewest items of exactly so many tokens, one batch a count;
* `cases`: nine batches of square images and of mixed ones, for which figures of an inference engine are public;
* `mix-v1`: 2,000 batches from `random.Random(0)`. A batch draws its size from 1, 1, 1, 1, 2, 2, 4, 4, 8, 16, 32, then
  for each image its height and its width, uniform in 224 to 2,048 pixels; batches over 16,384 tokens are left out;
* `mix-log`: the same with sides log-uniform;
* `videos`: one clip a batch of 2 to 64 temporal patches of 16x16 patches.

An image of `height x width` pixels becomes patches the way processors do it: sides rounded to whole merged units,
shrunk to the model's longest sequence where it has one; for tiles, one a `side x side` pixels, at most 12, and a
thumbnail where there is more than one.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onereplay.adapters.base import Adapter
from onereplay.adapters.multipath import GLOBAL, LOCAL
from onereplay.core.items import Modality
from onereplay.geometry import Grid

MIX_SIZES = (1, 1, 1, 1, 2, 2, 4, 4, 8, 16, 32)
MIX_BATCHES = 2000
MIX_SIDES = (224, 2048)
MIX_MAX_TOKENS = 16_384
MAX_TILES = 12
CLIP_FRAMES = (2, 4, 8, 16, 32, 64)
CLIP_SIDE = 16
WORKLOADS = ("single", "cases", "mix-v1", "mix-log", "videos")
SMALL, MIDDLE, LARGE = (224, 224), (448, 448), (896, 896)
WIDE, TALL, STRIP, POSTER = (476, 644), (644, 476), (280, 840), (1064, 588)
CASES = {
    "1x224": (SMALL,),
    "1x448": (MIDDLE,),
    "1x896": (LARGE,),
    "8x448": (MIDDLE,) * 8,
    "5x896": (LARGE,) * 5,
    "16x896": (LARGE,) * 16,
    "mix4": (SMALL, MIDDLE, TALL, LARGE),
    "mix8": (*[SMALL] * 2, *[MIDDLE] * 3, WIDE, STRIP, LARGE),
    "mix12": (*[SMALL] * 4, *[MIDDLE] * 3, *[TALL] * 2, *[LARGE] * 2, POSTER),
}
"""Height and width in pixels of each image of a batch."""

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """One batch as integers."""

    name: str
    items: tuple[tuple[Grid, ...], ...]
    """For each item its grids: one, or one a tile."""

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Of all items, in order."""
        return tuple(grid for item in self.items for grid in item)


def workload(name: str, adapter: Adapter[Any], token_counts: Sequence[int], limit: int | None = None) -> list[Shape]:
    """The batches of a workload.

    Args:
        name: one of `WORKLOADS`.
        adapter: the model.
        token_counts: for `single`.
        limit: the first so many batches only.
    """
    match name:
        case "single":
            found = list({shape.items: shape for shape in (sized(adapter, count) for count in token_counts)}.values())
        case "cases":
            found = [case(adapter, name) for name in CASES]
        case "mix-v1":
            found = _mix(adapter, lambda draw: draw.randint(*MIX_SIDES))
        case "mix-log":
            found = _mix(adapter, lambda draw: round(math.exp(draw.uniform(*map(math.log, MIX_SIDES)))))
        case _:
            found = _videos(adapter)
    return found[:limit]


def sized(adapter: Adapter[Any], tokens: int) -> Shape:
    """The fewest items of this many tokens on the model's first path; of a model of tiles, of whole tiles."""
    path = next(iter(adapter.paths()))
    unit = adapter.unit(path)
    whole = max(tokens // unit, 1) * unit
    _, grids = adapter.layouts(path, whole, tokens)[0]
    if _takes_counts(adapter):
        return Shape(f"{whole:,}", tuple((Grid(1, 1, 1),) * count for count in _portions(len(grids), MAX_TILES)))
    return Shape(f"{whole:,}", tuple((grid,) for grid in grids))


def case(adapter: Adapter[Any], name: str) -> Shape:
    """A batch of `CASES`."""
    return Shape(name, tuple(picture(adapter, *sides) for sides in CASES[name]))


def picture(adapter: Adapter[Any], height: int, width: int) -> tuple[Grid, ...]:
    """An image of this many pixels, as its grids; see the module."""
    if adapter.engine != "packed":
        side: int = adapter.sides[LOCAL] if adapter.engine == "multi-path" else adapter.tile_shape[-1]  # type: ignore[attr-defined]
        down, across = _tiles_of(height / side, width / side)
        if _takes_counts(adapter):
            return (Grid(1, 1, 1),) * (down * across + (down * across > 1))
        return (Grid(1, down, across) if down * across > 1 or adapter.engine == "tiles" else Grid(1, 0, 0),)
    merge = int(adapter.merge)  # type: ignore[attr-defined]
    unit = int(getattr(adapter.config, "vision_config", adapter.config).patch_size) * merge
    most: int | None = adapter.max_sequence_patches  # type: ignore[attr-defined]
    down, across = max(1, round(height / unit)), max(1, round(width / unit))
    if most is not None and down * across * merge**2 > most:
        shrink = math.sqrt(most / merge**2 / (down * across))
        down, across = max(1, int(down * shrink)), max(1, int(across * shrink))
    return (Grid(1, down * merge, across * merge),)


def mixed_sides(side: Callable[[random.Random], int]) -> Iterator[list[tuple[int, int]]]:
    """Height and width of each image of each batch of a mix, endlessly."""
    draw = random.Random(0)
    while True:
        yield [(side(draw), side(draw)) for _ in range(draw.choice(MIX_SIZES))]


def _mix(adapter: Adapter[Any], side: Callable[[random.Random], int]) -> list[Shape]:
    found: list[Shape] = []
    for batch, _ in zip(mixed_sides(side), range(MIX_BATCHES), strict=False):
        shape = Shape(f"{len(found)}", tuple(picture(adapter, *sides) for sides in batch))
        if num_tokens(adapter, shape) <= MIX_MAX_TOKENS:
            found.append(shape)
    return found


def _videos(adapter: Adapter[Any]) -> list[Shape]:
    if Modality.VIDEO not in adapter.modalities or adapter.engine == "tiles":
        return []
    side = CLIP_SIDE // int(adapter.merge) * int(adapter.merge)  # type: ignore[attr-defined]
    return [Shape(f"{frames} frames", ((Grid(frames, side, side),),)) for frames in CLIP_FRAMES]


def _portions(total: int, most: int) -> list[int]:
    full, rest = divmod(total, most)
    return [most] * full + [rest] * (rest > 0)


def num_tokens(adapter: Adapter[Any], shape: Shape) -> int:
    """Tokens of the batch, over all paths."""
    if adapter.engine == "multi-path":
        tiles = sum(grid.num_patches for grid in shape.grids)
        return adapter.unit(GLOBAL) * len(shape.grids) + adapter.unit(LOCAL) * tiles
    if adapter.engine == "tiles":
        unit = adapter.unit(next(iter(adapter.paths())))
        whole = 0 if _takes_counts(adapter) else 1  # beside its crops an image has a tile of the whole
        return unit * sum(grid.num_patches + whole for grid in shape.grids)
    return sum(adapter.size(grid).tokens for grid in shape.grids)  # type: ignore[attr-defined]


def _takes_counts(adapter: Adapter[Any]) -> bool:
    """A model of tiles that only counts them; others want to know how an image's tiles lie."""
    return bool(getattr(adapter, "size_names", ()))


def _tiles_of(down: float, across: float) -> tuple[int, int]:
    """Rows and columns of tiles, at most `MAX_TILES`, in about these proportions."""
    shrink = min(1.0, math.sqrt(MAX_TILES / (down * across)))
    return max(1, round(down * shrink)), max(1, min(round(across * shrink), MAX_TILES // max(1, round(down * shrink))))


def processor_outputs(
    adapter: Adapter[Any], shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Inputs:
    """What the model's processor would return: on the CPU, pixels in float32 from a fixed seed, rounded to `dtype`.

    Another `device` draws the pixels there, and draws others.
    """
    inputs: Inputs = dict(adapter.example_inputs(shape.grids, torch.Generator(device).manual_seed(0)))
    inputs = {name: value.to(dtype).float() if _holds_pixels(value) else value for name, value in inputs.items()}
    if _takes_counts(adapter):
        names: tuple[str, ...] = adapter.size_names  # type: ignore[attr-defined]
        counts = "num_patches" if "num_patches" in names else names[0]
        inputs[counts] = [len(item) for item in shape.items]
    return inputs


def with_pixels_on(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Inputs:
    """The same inputs with pixels on the device, in the encoder's dtype; everything else stays on the CPU."""
    return {name: value.to(device, dtype) if _holds_pixels(value) else value for name, value in inputs.items()}


def _holds_pixels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
