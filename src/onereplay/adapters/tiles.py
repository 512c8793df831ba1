"""The tiles engine: `[N, channels, side, side]` in (or `[N, bands, frames]`), a fixed number of tokens a tile out.

A tile attends only to itself, so padding tiles need no metadata: they keep whatever they held and no real tile reads
them. Capacity is counted in tiles (sequences), never in items: an item has one tile or many.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from onereplay.adapters.base import Adapter, refuse_unknown, take_rows, tile_counts
from onereplay.attention.interface import use_varlen_on_tiles
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.assembly import split_rows
from onereplay.core.buffers import Declaration, Output, Packed, Staged
from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.plan import Capacity
from onereplay.core.protocol import PathSpec
from onereplay.errors import InputError
from onereplay.geometry import Grid

PATH = "vision"


@dataclass(frozen=True)
class TileBatch:
    """Items of a model of tiles."""

    items: tuple[Item, ...]
    tiles: tuple[Tensor, ...]
    """Tensors `(tiles, *tile_shape)` whose tiles follow one another, in the items' order."""


class TileAdapter(Adapter[TileBatch]):
    """What all models of fixed tiles share.

    Capacity rule: a budget of T tokens holds exactly `T / tile_tokens` tiles, of at most as many items.
    """

    engine = "tiles"
    path: ClassVar[str] = PATH
    input_name: ClassVar[str] = "pixel_values"
    """What the tiles are called among the inputs."""
    size_names: ClassVar[tuple[str, ...]] = ("num_patches",)
    """Entries that say which tiles belong together. Every model takes `num_patches`, the tiles of each image; a model
    with videos takes `num_frames`; and what its processor calls it otherwise."""

    @property
    @abstractmethod
    def tile_shape(self) -> tuple[int, ...]:
        """Of the tiles that graphs are captured for: channels, height and width; or bands and frames of sound. The last
        two are the sides that `tokens_of` takes."""

    @abstractmethod
    def tokens_of(self, height: int, width: int) -> int:
        """Tokens of one tile of this size, in pixels.

        Raises:
            InputError: the tower cannot take a tile of this size.
        """

    @abstractmethod
    def patches_of(self, height: int, width: int) -> int:
        """Rows of one tile inside the tower."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """The width of a token."""

    @cached_property
    def tile_tokens(self) -> int:
        """Tokens of one captured tile."""
        return self.tokens_of(*self.tile_shape[-2:])

    def buffers(self) -> tuple[Declaration, ...]:
        """The tiles, as `pixels`."""
        return (Staged("pixels", "sequences", self.tile_shape),)

    def outputs(self) -> tuple[Output, ...]:
        """The tokens."""
        return (Output("features", "tokens", (self.hidden_size,)),)

    def paths(self) -> Mapping[str, PathSpec]:
        """One path."""
        return {self.path: PathSpec(self.buffers(), self.outputs())}

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """One capacity a budget; budgets are multiples of a tile's tokens."""
        patches = self.patches_of(*self.tile_shape[-2:])
        return [
            Capacity(
                tokens=tokens,
                patches=tokens // self.tile_tokens * patches,
                sequences=tokens // self.tile_tokens,
                items=min(tokens // self.tile_tokens, config.items_bound),
                longest=patches,
            )
            for tokens in config.ladder(self.max_batch_tokens, self.tile_tokens)
        ]

    def item(self, modality: Modality, num_tiles: int, height: int, width: int) -> Item:
        """An item of `num_tiles` tiles of this size; of another size than the captured one it runs eagerly."""
        patches = self.patches_of(height, width)
        size = PathSize(num_tiles * self.tokens_of(height, width), num_tiles * patches, num_tiles, longest=patches)
        captured = self.tile_shape[-2:]
        other = f"tiles of {height}x{width}, captured for {captured[0]}x{captured[1]}"
        return Item(modality, {self.path: size}, "" if (height, width) == captured else other)

    def image_counts(self, given: Mapping[str, Any]) -> Any:
        """The tiles of each image by what `size_names` say, as integers; None where they say nothing."""
        return given.get("num_patches")

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From what `size_names` say, for tiles of the captured size."""
        given = refuse_unknown(sizes, self.size_names, self.model_type)
        return self._items(self._counted(given, None), *self.tile_shape[-2:])

    def batch(self, **inputs: Any) -> TileBatch:
        """From `pixel_values` `(tiles, channels, height, width)`.

        `num_patches` (integers) says how many tiles each image has, and `num_frames`, where the model takes videos, the
        same for videos, one frame a tile, behind the images; without either every tile is an item. `size_names` lists
        what else the model takes.
        """
        name = self.input_name
        given = refuse_unknown(inputs, (name, *self.size_names), self.model_type)
        if not given:
            return TileBatch((), ())
        if name not in given:
            raise InputError(f"{' and '.join(given)} count the tiles of {name}; give it too")
        tiles = given[name]
        self.check_tiles(name, tiles)
        items = self._items(self._counted(given, len(tiles)), *tiles.shape[-2:])
        return TileBatch(items, (tiles,))

    def check_tiles(self, name: str, tiles: Tensor) -> None:
        """Refuse what is not `(tiles, *tile_shape)`, up to the last two sides.

        Raises:
            InputError: with the shape, and the one that the graphs are captured for.
        """
        if tiles.ndim != 1 + len(self.tile_shape) or tiles.shape[1:-2] != self.tile_shape[:-2]:
            wanted = ", ".join(map(str, self.tile_shape))
            raise InputError(f"{name} has shape {tuple(tiles.shape)}, {self.model_type} takes (tiles, {wanted})")

    def refuse_other_sizes(self, height: int, width: int) -> None:
        """For a tower that has positions for the captured size alone.

        Raises:
            InputError: the tile has another size.
        """
        if (height, width) != self.tile_shape[-2:]:
            sides = "x".join(map(str, self.tile_shape[-2:]))
            raise InputError(
                f"a tile of {height}x{width} pixels; {self.model_type} needs a square of {sides}, the one size that "
                f"its tower has positions for"
            )

    def own_attention(self, config: Any) -> AbstractContextManager[None]:
        """For the tower of this vision config: see `use_varlen_on_tiles`."""
        return use_varlen_on_tiles(config, self.attention, self.weight)

    def unit(self, path: str) -> int:
        """A tile's tokens."""
        return self.tile_tokens

    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """Tiles do not see each other, so there is one layout."""
        tiles = tokens // self.tile_tokens
        return [(f"{tiles} tiles", [Grid(1, 1, 1)] * tiles)]

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """One tile of the captured size for each grid."""
        shape = (len(grids), *self.tile_shape)
        return {self.input_name: torch.randn(shape, generator=generator, device=generator.device)}

    def stock_features(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """All rows that the stock entry points give; pixels in the model's dtype: not every tower converts them."""
        dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
        floats = {
            name: value.to(dtype)
            for name, value in inputs.items()
            if torch.is_tensor(value) and value.is_floating_point()
        }
        return super().stock_features(model, {**inputs, **floats})

    def _counted(self, given: Mapping[str, Any], num_tiles: int | None) -> dict[Modality, list[int]]:
        """Tiles of each image and of each video, which are `num_tiles` together if that is known."""
        frames = tile_counts("num_frames", given.get("num_frames", ()), None)
        images = self.image_counts(given)
        name = next((name for name in self.size_names if name in given), self.size_names[0])
        if images is None and frames:
            images = ()
        left = None if num_tiles is None else num_tiles - sum(frames)
        return {self.modalities[0]: tile_counts(name, images, left), Modality.VIDEO: frames}

    def _items(self, counted: Mapping[Modality, Sequence[int]], height: int, width: int) -> tuple[Item, ...]:
        return tuple(
            self.item(modality, count, height, width) for modality, counts in counted.items() for count in counts
        )

    def pack(self, path: str, batch: TileBatch) -> Packed:
        """Tiles carry no metadata."""
        return Packed([item.sizes[path] for item in batch.items], (), {"pixels": batch.tiles})

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: TileBatch) -> list[Tensor]:
        """Each item's rows: tokens of its tiles, one tile behind the other."""
        return split_rows(rows[self.path][0], [item.sizes[self.path].tokens for item in batch.items])

    def select(self, batch: TileBatch, chosen: Sequence[int]) -> TileBatch:
        """Items with their tiles."""
        counts = [item.sizes[self.path].sequences for item in batch.items]
        return TileBatch(tuple(batch.items[place] for place in chosen), take_rows(batch.tiles, counts, chosen))

    def join(self, batches: Sequence[TileBatch]) -> TileBatch:
        """Items and tiles one behind the other. Tiles of several sizes cannot share a batch.

        Raises:
            InputError: the sizes differ.
        """
        tiles = tuple(tiles for batch in batches for tiles in batch.tiles)
        shapes = sorted({tuple(part.shape[1:]) for part in tiles})
        if len(shapes) > 1:
            raise InputError(f"tiles of several sizes in one batch, {shapes}; encode each size by itself")
        return TileBatch(tuple(item for batch in batches for item in batch.items), tiles)
