"""The tiles engine: `[N, channels, side, side]` in, a fixed number of tokens a tile out.

A tile attends only to itself, so padding tiles need no metadata: they keep whatever they held and no real tile reads
them. Capacity is counted in tiles (sequences), never in items: an item has one tile or many.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onereplay.adapters.base import Adapter, refuse_unknown, tile_counts
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.assembly import split_rows
from onereplay.core.buffers import Output, Packed, Staged
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
    """Tensors `(tiles, channels, height, width)` whose tiles follow one another, in the items' order."""


class TileAdapter(Adapter[TileBatch]):
    """What all models of fixed tiles share.

    Capacity rule: a budget of T tokens holds exactly `T / tile_tokens` tiles, of at most as many items.
    """

    engine = "tiles"

    @property
    @abstractmethod
    def tile_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the tiles that graphs are captured for."""

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
        return self.tokens_of(*self.tile_shape[1:])

    def paths(self) -> Mapping[str, PathSpec]:
        """One path."""
        pixels = Staged("pixels", "sequences", self.tile_shape)
        return {PATH: PathSpec((pixels,), (Output("features", "tokens", (self.hidden_size,)),))}

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """One capacity a budget; budgets are multiples of a tile's tokens."""
        patches = self.patches_of(*self.tile_shape[1:])
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
        captured = self.tile_shape[1:]
        other = f"tiles of {height}x{width}, captured for {captured[0]}x{captured[1]}"
        return Item(modality, {PATH: size}, "" if (height, width) == captured else other)

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `num_patches` and `num_frames`, for tiles of the captured size."""
        given = refuse_unknown(sizes, ("num_patches", "num_frames"), self.model_type)
        num_tiles = sum(sum(tile_counts(name, counts, None)) for name, counts in given.items())
        return self._items(given, num_tiles, *self.tile_shape[1:])

    def batch(self, **inputs: Any) -> TileBatch:
        """From `pixel_values` `(tiles, channels, height, width)`.

        `num_patches` (integers, the name that the image processor uses) says how many tiles each image has, and
        `num_frames` the same for videos, one frame a tile, behind the images; without either every tile is an item.
        """
        given = refuse_unknown(inputs, ("pixel_values", "num_patches", "num_frames"), self.model_type)
        if not given:
            return TileBatch((), ())
        if "pixel_values" not in given:
            raise InputError("num_patches and num_frames count the tiles of pixel_values; give it too")
        tiles = given["pixel_values"]
        if tiles.ndim != 4 or tiles.shape[1] != self.tile_shape[0]:
            raise InputError(
                f"pixel_values has shape {tuple(tiles.shape)}, {self.model_type} takes (tiles, {self.tile_shape[0]}, "
                f"{self.tile_shape[1]}, {self.tile_shape[2]})"
            )
        items = self._items(given, len(tiles), *tiles.shape[2:])
        return TileBatch(items, (tiles,))

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
        return {"pixel_values": torch.randn(shape, generator=generator, device=generator.device)}

    def _items(self, given: Mapping[str, Any], num_tiles: int, height: int, width: int) -> tuple[Item, ...]:
        frames = _integers(given.get("num_frames", ()))
        images = given.get("num_patches", () if frames else None)
        counted = {
            Modality.IMAGE: tile_counts("num_patches", images, num_tiles - sum(frames)),
            Modality.VIDEO: tile_counts("num_frames", frames, sum(frames)),
        }
        return tuple(
            self.item(modality, count, height, width) for modality, counts in counted.items() for count in counts
        )

    def pack(self, path: str, batch: TileBatch) -> Packed:
        """Tiles carry no metadata."""
        return Packed([item.sizes[path] for item in batch.items], (), {"pixels": batch.tiles})

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: TileBatch) -> list[Tensor]:
        """Each item's rows: tokens of its tiles, one tile behind the other."""
        return split_rows(rows[PATH][0], [item.num_tokens for item in batch.items])

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


def _integers(counts: Any) -> list[int]:
    return tile_counts("num_frames", counts, None)
