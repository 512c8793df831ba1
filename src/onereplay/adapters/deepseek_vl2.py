"""DeepSeek-VL2: fixed tiles through a tower of our own, and a gather that lays the tiles of an image side by side.

Checkpoints: `deepseek-ai/deepseek-vl2{-tiny,-small,}`. transformers has no such model; ours is
`onereplay.models.deepseek_vl_v2`, whose plain `get_image_features` is what results are compared with. An image is a
tile of the whole and `across x down` tiles of its parts. A learned newline ends every row of the picture that the tiles
make together, a learned separator stands between the whole and the parts: at 14 tokens a side of a tile,
`14 * 15 + 1 + (14 * down) * (14 * across + 1)` rows.

Capacity rule: see `TileAdapter`; budgets count tokens of tiles (196 each), delimiters come in at the end. A budget of
one tile would hold no image and is left out.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.base import host_rows, refuse_unknown
from onereplay.adapters.tiles import PATH, TileAdapter, TileBatch
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.assembly import gather_rows
from onereplay.core.buffers import Buffers
from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.plan import Capacity
from onereplay.errors import ConfigError, InputError, UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.geometry.grids import Int64

_INPUTS = ("pixel_values", "images_spatial_crop")
_NEWLINE, _SEPARATOR, _DELIMITERS = 0, 1, 2
"""Rows of the pool that hold delimiters, and how many there are."""


@dataclass(frozen=True)
class CroppedBatch(TileBatch):
    """Items of tiles, and how the tiles of each lie."""

    crops: tuple[tuple[int, int], ...] = ()
    """Columns and rows of tiles of each item."""


class DeepseekVL2(TileAdapter):
    """DeepSeek-VL2."""

    model_type = "deepseek_vl_v2"
    parts = ("vision", "projector", "image_newline", "view_seperator")
    modalities = (Modality.IMAGE,)
    entry_points: ClassVar = {"get_image_features": _INPUTS}
    size_names = ()

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if config.tile_tag != "2D" or config.global_view_pos not in ("head", "tail"):
            raise UnsupportedModelError(
                f"deepseek_vl_v2 with tile_tag={config.tile_tag!r} and global_view_pos={config.global_view_pos!r} is "
                f"not supported; use '2D' and 'head', as published"
            )
        self._index = functools.lru_cache(256)(self._span)

    # sizes

    @cached_property
    def tile_shape(self) -> tuple[int, int, int]:
        """3 x 384 x 384 in the published checkpoints."""
        side = int(self.config.vision_config.image_size)
        return 3, side, side

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.projector_config.n_embed)

    @cached_property
    def side(self) -> int:
        """Tokens along a side of a tile: 14 in the published checkpoints, where 27 patches are filled up to 28."""
        return -(-int(self.config.vision_config.side) // int(self.config.projector_config.downsample_ratio))

    def tokens_of(self, height: int, width: int) -> int:
        """Of the one size that the table of positions is for."""
        if (height, width) != self.tile_shape[1:]:
            raise InputError(f"a tile of {height}x{width} pixels; {self.model_type} takes {self.tile_shape[1:]}")
        return self.side**2

    def patches_of(self, height: int, width: int) -> int:
        """729 in the published checkpoints."""
        return int(self.config.vision_config.side) ** 2

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """Those that hold an image, of two tiles at least."""
        found = [capacity for capacity in super().capacities(path, config) if capacity.sequences > 1]
        if not found:
            raise ConfigError(
                f"no budget holds an image of {self.model_type}, at least 2 tiles of {self.tile_tokens} tokens; raise "
                f"the largest to {2 * self.tile_tokens}"
            )
        return found

    # pack

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `images_spatial_crop`."""
        given = refuse_unknown(sizes, _INPUTS[1:], self.model_type)
        return tuple(self._item(crop) for crop in _crops(given[_INPUTS[1]])) if given else ()

    def batch(self, **inputs: Any) -> CroppedBatch:
        """From `pixel_values` `(tiles, 3, height, width)` and `images_spatial_crop` `(images, 2)`.

        Of each image the whole comes first, then its tiles row by row; a row of the table is (columns, rows) of tiles.
        """
        given = refuse_unknown(inputs, _INPUTS, self.model_type)
        if not given:
            return CroppedBatch((), ())
        if len(given) != len(_INPUTS):
            raise InputError("pixel_values and images_spatial_crop come together; give both")
        crops, tiles = _crops(given["images_spatial_crop"]), given["pixel_values"]
        expected = (sum(1 + across * down for across, down in crops), *self.tile_shape)
        if tuple(tiles.shape) != expected:
            raise InputError(f"pixel_values has shape {tuple(tiles.shape)}, images_spatial_crop asks for {expected}")
        return CroppedBatch(tuple(self._item(crop) for crop in crops), (tiles,), crops)

    def _item(self, crop: tuple[int, int]) -> Item:
        across, down = crop
        tiles, patches = 1 + across * down, self.patches_of(*self.tile_shape[1:])
        size = PathSize(tiles * self.tile_tokens, tiles * patches, tiles, longest=patches)
        return Item(Modality.IMAGE, {PATH: size}, rows=len(self._index(crop)))

    def join(self, batches: Sequence[TileBatch]) -> CroppedBatch:
        """Items, tiles and crops one behind the other."""
        joined = super().join(batches)
        crops = tuple(crop for batch in batches if isinstance(batch, CroppedBatch) for crop in batch.crops)
        return CroppedBatch(joined.items, joined.tiles, crops)

    def select(self, batch: TileBatch, chosen: Sequence[int]) -> CroppedBatch:
        """Items with their tiles and crops."""
        assert isinstance(batch, CroppedBatch)
        found = super().select(batch, chosen)
        return CroppedBatch(found.items, found.tiles, tuple(batch.crops[place] for place in chosen))

    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """One image, and as many as there may be; a grid is an image of `h x w` tiles and the whole."""
        tiles = tokens // self.tile_tokens
        found = [("one image", [geometry.square_grid(tiles - 1, 1)])] if tiles > 1 else []
        if (many := min(tiles // 2, max_items)) > 1:
            parts = geometry.unequal_parts(tiles, many)
            found.append((f"{many} images", [geometry.square_grid(part - 1, 1) for part in parts]))
        return found

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Each grid is one image of so many tiles, and the whole."""
        shape = (sum(1 + grid.num_patches for grid in grids), *self.tile_shape)
        return {
            "pixel_values": torch.randn(shape, generator=generator, device=generator.device),
            "images_spatial_crop": torch.tensor([(grid.w, grid.h) for grid in grids]),
        }

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every block of the tower."""
        return self.own.vision.blocks  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Tower and projector: `(tiles * tile_tokens, hidden)`.

        `auto` keeps the tower's own attention unless FlashAttention 4 is there, a named one replaces it.
        """
        tower = self.own.vision
        with self.own_attention(tower.config):
            features: Tensor = self.own.projector(tower(buffers.pixels))
        return (features.flatten(0, 1),)

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: TileBatch) -> list[Tensor]:
        """Each image's rows, newlines and separator among them."""
        assert isinstance(batch, CroppedBatch)
        counts = [item.num_tokens for item in batch.items]
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        indices = [
            geometry.placed(self._index(crop), start, _DELIMITERS)
            for crop, start in zip(batch.crops, starts, strict=True)
        ]
        delimiters = torch.stack([self.own.image_newline, self.own.view_seperator])
        return gather_rows([delimiters, rows[PATH][0]], indices)

    def _span(self, crop: tuple[int, int]) -> Int64:
        """The rows of one image, as `geometry.spans` says; kept for crops that come again."""
        across, down = crop
        whole = _DELIMITERS + geometry.raster_of_tiles(1, 1, self.side)
        parts = _DELIMITERS + self.side**2 + geometry.raster_of_tiles(down, across, self.side)
        spans = [geometry.with_newlines(rows, _NEWLINE) for rows in (whole, parts)]
        first, last = spans if self.config.global_view_pos == "head" else spans[::-1]
        return np.concatenate([first, [_SEPARATOR], last])

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a tuple, one tensor an image."""
        return BaseModelOutputWithPooling(pooler_output=tuple(features))


def _crops(table: Any) -> tuple[tuple[int, int], ...]:
    crops = tuple((across, down) for across, down in host_rows("images_spatial_crop", table, 2))
    empty = next((crop for crop in crops if min(crop) < 1), None)
    if empty is not None:
        raise InputError(f"images_spatial_crop has {empty}; an image has at least 1 column and 1 row of tiles")
    return crops
