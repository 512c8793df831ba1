"""The multi-path engine: an image is one tile on the global path and any number of smaller ones on the local path; each
path has graphs of its own, and one gather puts the rows of both, and learned delimiter rows, into published order.

A batch is at most one replay or one eager forward on each path: local tiles over the local cap make that path eager and
leave the other a replay. A path that no item uses runs nothing. Tiles attend to themselves only (see `tiles`).
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay.adapters.base import Adapter, plain_numbers, refuse_unknown, take_rows
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.assembly import gather_rows
from onereplay.core.buffers import Output, Packed, Staged
from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.plan import Capacity
from onereplay.core.protocol import PathSpec
from onereplay.errors import InputError
from onereplay.geometry import Grid, square_grid
from onereplay.geometry.grids import Int64

GLOBAL, LOCAL = "global", "local"
PIXELS: Mapping[str, str] = {GLOBAL: "pixel_values", LOCAL: "pixel_values_local"}
"""The input that each path takes, in the order of the paths."""
ORDERS_KEPT = 256
"""Arrangements whose index arrays are kept; one of 36 tiles and 3,085 rows takes 48 KiB."""


@dataclass(frozen=True)
class MultiPathBatch:
    """Items of a multi-path model."""

    items: tuple[Item, ...]
    grids: tuple[Grid, ...]
    """The local tiles of each item, `(1, rows, columns)`; `(1, 0, 0)` for none."""
    tiles: Mapping[str, tuple[Tensor, ...]]
    """By path: tensors `(tiles, channels, side, side)` whose tiles follow one another, in the items' order."""


class MultiPathAdapter(Adapter[MultiPathBatch]):
    """What models of a global view and local tiles share.

    Capacity rule: on each path, a budget of T tokens holds exactly `T / tokens of a tile` tiles, of at most as many
    items. Tiles of another size than the captured one run eagerly, both paths of their item.
    """

    engine = "multi-path"
    modalities = (Modality.IMAGE,)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "get_image_features": ("pixel_values", "pixel_values_local", "num_local_patches")
    }
    ignored: ClassVar[tuple[str, ...]] = ()
    """What the model's processor gives for its prompt alone."""

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        self._pieces: Callable[[Grid, int, int], tuple[Int64, Int64]] = functools.lru_cache(ORDERS_KEPT)(self._piece)

    @property
    @abstractmethod
    def sides(self) -> Mapping[str, int]:
        """Height and width in pixels of the tiles that graphs are captured for, by path."""

    @abstractmethod
    def tokens_of(self, side: int) -> int:
        """Tokens of one tile of this height and width in pixels, on either path.

        Raises:
            InputError: the tower cannot take a tile of this size.
        """

    @abstractmethod
    def patches_of(self, side: int) -> int:
        """Rows of one tile inside the tower."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """The width of a token."""

    @abstractmethod
    def order(self, grid: Grid, global_tokens: int, local_tokens: int) -> Int64:
        """The rows of one item's result, as published: `(rows,)`.

        An entry is a place among the item's own rows: first those of its global tile, then those of its local tiles,
        one behind the other, then all delimiter rows. Kept by what is given here.

        Args:
            grid: of local tiles, `(1, rows, columns)`; `(1, 0, 0)` for none.
            global_tokens: of its global tile.
            local_tokens: of one local tile.
        """

    def delimiters(self) -> Sequence[Tensor]:
        """Learned rows, each `(rows, hidden)`, that `order` counts behind the tiles' rows."""
        return ()

    # The core's side

    def unit(self, path: str) -> int:
        """A tile's tokens on this path."""
        return self.tokens_of(self.sides[path])

    @cached_property
    def channels(self) -> int:
        """Of the tiles."""
        return 3

    def paths(self) -> Mapping[str, PathSpec]:
        """Global and local."""
        output = Output("features", "tokens", (self.hidden_size,))
        return {
            path: PathSpec((Staged("pixels", "sequences", (self.channels, side, side)),), (output,))
            for path, side in self.sides.items()
        }

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """One capacity a budget; budgets are multiples of a tile's tokens."""
        unit, patches = self.unit(path), self.patches_of(self.sides[path])
        return [
            Capacity(
                tokens=tokens,
                patches=tokens // unit * patches,
                sequences=tokens // unit,
                items=min(tokens // unit, config.items_bound),
                longest=patches,
            )
            for tokens in config.ladder(self.max_batch_tokens, unit)
        ]

    def pack(self, path: str, batch: MultiPathBatch) -> Packed:
        """Tiles carry no metadata."""
        sizes = [item.sizes[path] for item in batch.items if path in item.sizes]
        return Packed(sizes, (), {"pixels": batch.tiles[path]})

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: MultiPathBatch) -> list[Tensor]:
        """Each item's rows in published order, by one gather."""
        pool = [rows[path][0] for path in PIXELS if path in rows]
        ends = np.cumsum([len(part) for part in pool])
        starts = np.array([0, ends[0], ends[-1]])
        indices = []
        for item, grid in zip(batch.items, batch.grids, strict=True):
            tokens = [item.sizes[path].tokens if path in item.sizes else 0 for path in PIXELS]
            places, regions = self._pieces(grid, tokens[0], tokens[1] // max(grid.num_patches, 1))
            indices.append(places + starts[regions])
            starts[:2] += tokens
        return gather_rows([*pool, *self.delimiters()], indices)

    def _piece(self, grid: Grid, global_tokens: int, local_tokens: int) -> tuple[Int64, Int64]:
        """`order` as places within a region, and the regions: 0 global rows, 1 local rows, 2 delimiters."""
        order = self.order(grid, global_tokens, local_tokens)
        bounds = np.array([0, global_tokens, global_tokens + grid.num_patches * local_tokens])
        regions = np.searchsorted(bounds[1:], order, side="right")
        return order - bounds[regions], regions

    # Batches

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `num_local_patches` (and what else says how local tiles lie), for tiles of the captured size."""
        given = refuse_unknown(sizes, (*self.size_inputs, *self.ignored), self.model_type)
        return tuple(self.item(grid, *self.sides.values()) for grid in self.grids_of(given, None)) if given else ()

    @property
    def size_inputs(self) -> tuple[str, ...]:
        """Inputs of the entry point that hold sizes."""
        (names,) = self.entry_points.values()
        return tuple(name for name in names if name not in PIXELS.values())

    def batch(self, **inputs: Any) -> MultiPathBatch:
        """From `pixel_values` `(N, channels, side, side)`, a tile an image; `pixel_values_local` `(L, channels, side,
        side)`, the local tiles of all images; and `num_local_patches`, how many of those each image has.

        Without the last two no image has local tiles.
        """
        given = refuse_unknown(inputs, (*PIXELS.values(), *self.size_inputs, *self.ignored), self.model_type)
        if not given:
            return MultiPathBatch((), (), dict.fromkeys(PIXELS, ()))
        if PIXELS[GLOBAL] not in given:
            raise InputError(f"{self.model_type} needs pixel_values, the global view of every image; give it too")
        tiles = {path: (given[name],) for path, name in PIXELS.items() if name in given and len(given[name])}
        sides = {path: self._side(PIXELS[path], part) for path, (part,) in tiles.items()}
        grids = self.grids_of(given, len(given[PIXELS[GLOBAL]]))
        local_tiles = sum(grid.num_patches for grid in grids)
        found = len(tiles[LOCAL][0]) if LOCAL in tiles else 0
        if local_tiles != found:
            raise InputError(f"num_local_patches adds up to {local_tiles} tiles, pixel_values_local has {found}")
        both = {**self.sides, **sides}
        items = tuple(self.item(grid, both[GLOBAL], both[LOCAL]) for grid in grids)
        return MultiPathBatch(items, grids, {path: tiles.get(path, ()) for path in PIXELS})

    def _side(self, name: str, tiles: Tensor) -> int:
        shape = tuple(tiles.shape)
        if len(shape) != 4 or shape[1] != self.channels or shape[2] != shape[3]:
            raise InputError(
                f"{name} has shape {shape}, {self.model_type} takes square tiles (tiles, {self.channels}, side, side)"
            )
        try:
            self.tokens_of(shape[2])
        except InputError as error:
            raise InputError(f"{name} has shape {shape}: {error}") from error
        return shape[2]

    def grids_of(self, given: Mapping[str, Any], num_items: int | None) -> tuple[Grid, ...]:
        """The local tiles of each item; here only their number matters, and they count as one row."""
        counts = local_counts(given.get("num_local_patches"), num_items)
        return tuple(Grid(1, min(count, 1), count) for count in counts)

    def item(self, grid: Grid, global_side: int, local_side: int) -> Item:
        """An image with these local tiles; of other sizes than the captured ones it runs eagerly."""
        sizes = {GLOBAL: self._size(1, global_side)}
        if grid.num_patches:
            sizes[LOCAL] = self._size(grid.num_patches, local_side)
        local_tokens = self.tokens_of(local_side) if grid.num_patches else 0
        rows = len(self._pieces(grid, sizes[GLOBAL].tokens, local_tokens)[0])
        sides = {GLOBAL: global_side, LOCAL: local_side}
        other = [
            f"{path} tiles of {sides[path]} pixels, captured for {self.sides[path]}"
            for path in sizes
            if sides[path] != self.sides[path]
        ]
        return Item(Modality.IMAGE, sizes, "; ".join(other), rows)

    def _size(self, tiles: int, side: int) -> PathSize:
        patches = self.patches_of(side)
        return PathSize(tiles * self.tokens_of(side), tiles * patches, tiles, longest=patches)

    def join(self, batches: Sequence[MultiPathBatch]) -> MultiPathBatch:
        """Items and tiles one behind the other. Tiles of several sizes cannot share a path of a batch.

        Raises:
            InputError: the sizes differ.
        """
        tiles = {path: tuple(part for batch in batches for part in batch.tiles[path]) for path in PIXELS}
        for path, parts in tiles.items():
            shapes = sorted({tuple(part.shape[1:]) for part in parts})
            if len(shapes) > 1:
                raise InputError(f"{path} tiles of several sizes in one batch, {shapes}; encode each size by itself")
        return MultiPathBatch(
            items=tuple(item for batch in batches for item in batch.items),
            grids=tuple(grid for batch in batches for grid in batch.grids),
            tiles=tiles,
        )

    def select(self, batch: MultiPathBatch, chosen: Sequence[int]) -> MultiPathBatch:
        """Items with their tiles on both paths."""
        counts = {GLOBAL: [1] * len(batch.items), LOCAL: [grid.num_patches for grid in batch.grids]}
        return MultiPathBatch(
            items=tuple(batch.items[place] for place in chosen),
            grids=tuple(batch.grids[place] for place in chosen),
            tiles={path: take_rows(batch.tiles[path], counts[path], chosen) for path in PIXELS},
        )

    # Checks and outputs

    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """On the global path: images without local tiles, and images of which some have them. On the local path: one
        image, and several with one between them that has none."""
        tiles = tokens // self.unit(path)
        none = Grid(1, 0, 0)
        if path == GLOBAL:
            mixed = [(none, Grid(1, 2, 1), none, Grid(1, 1, 3))[place % 4] for place in range(1, tiles + 1)]
            return [(f"{tiles} images", [none] * tiles), (f"{tiles} images, some with local tiles", mixed)]
        found = [(f"an image of {tiles} local tiles", [square_grid(tiles, 1)])]
        if tiles > 2 and max_items > 1:
            found.append(("images with and without", [square_grid(tiles - 2, 1), none, Grid(1, 1, 2)]))
        return found

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """An image a grid, of captured sizes; the grid is that of its local tiles, `(1, 0, 0)` for none."""
        counts = [grid.num_patches for grid in grids]
        inputs = {"num_local_patches": torch.tensor(counts)}
        for path, tiles in ((GLOBAL, len(grids)), (LOCAL, sum(counts))):
            if tiles:
                shape = (tiles, self.channels, self.sides[path], self.sides[path])
                inputs[PIXELS[path]] = torch.randn(shape, generator=generator, device=generator.device)
        return inputs

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a list, one tensor an image."""
        return BaseModelOutputWithPooling(pooler_output=list(features))


def local_counts(value: Any, num_items: int | None) -> list[int]:
    """`num_local_patches` as Python integers; zeros where it is not given.

    Raises:
        InputError: not a list of integers from 0, or not one an image.
    """
    if value is None:
        return [0] * (num_items or 0)
    try:
        counts = plain_numbers(value)
    except TypeError:
        counts = value
    integers = isinstance(counts, list) and all(isinstance(count, int) and count >= 0 for count in counts)
    if not integers or any(isinstance(count, bool) for count in counts):
        raise InputError(f"num_local_patches={value!r:.80} must be a list of integers from 0, one an image")
    if num_items is not None and len(counts) != num_items:
        raise InputError(f"num_local_patches has {len(counts)} entries, pixel_values has {num_items} images")
    return list(counts)


def local_then_global(grid: Grid, global_tokens: int, local_tokens: int) -> Int64:
    """The order of models that put local tiles, one behind the other, in front of the global one."""
    local = np.arange(grid.num_patches * local_tokens, dtype=np.int64)
    return np.concatenate([global_tokens + local, np.arange(global_tokens, dtype=np.int64)])
