"""DeepSeek-OCR: SAM features of a tile go through CLIP, both are projected; newlines and a separator by the gather.

Checkpoint: `deepseek-ai/DeepSeek-OCR`; tower and weights' names are in `models/deepseek_ocr.py`. Reference:
`deepencoder.py` and `modeling_deepseekocr.py` of the checkpoint; `modeling_unlimited_ocr.py` of transformers 5.24 has
the same vision stack.

An image is a global view of 1,024 pixels, 256 tokens, and no or 2 to 9 local tiles of 640 pixels, 100 tokens each. Its
result is the tiles put together as one picture of rows, a newline behind each row; then the global rows, with newlines
too; then a separator: 273 rows without tiles, and `10 r * (10 c + 1)` more for r x c tiles.

Capacity rule: see `MultiPathAdapter`. SAM's four global layers make a bias of every position to every other, heads x
4,096 x 4,096 for a global view (400 MB in bf16) and a sixth of that for a local tile; one layer's at a time, in the
graphs' pool. 5,120 tokens are the largest batch also without `max_token_budget`: 20 views, 8 GB. A smaller
`max_token_budget` bounds it further.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from onereplay.adapters.base import host_rows
from onereplay.adapters.multipath import GLOBAL, LOCAL, MultiPathAdapter, local_counts
from onereplay.adapters.sam import sam_features, use_sliding_positions
from onereplay.attention.interface import use_varlen_on_tiles
from onereplay.core.buffers import Buffers
from onereplay.errors import InputError
from onereplay.geometry import Grid
from onereplay.geometry.grids import Int64

SAM_MERGE = 4
"""Sides of patches that one SAM feature stands for: two convolutions of stride 2."""


class DeepEncoder(MultiPathAdapter):
    """What both DeepSeek-OCR models share: SAM in front of a second encoder, at two sizes of tiles."""

    max_batch_tokens = 5120
    published_sides: ClassVar[Mapping[str, int]]
    """Pixels of a tile as the published processor makes them; configurations have the global one alone."""

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if model is not None:
            use_sliding_positions(self.own.vision_tower.sam_encoder)

    # sizes

    @cached_property
    def sam(self) -> Any:
        """The configuration of SAM."""
        return self.config.vision_config.sam_config

    @cached_property
    def sides(self) -> Mapping[str, int]:
        """The global side is SAM's, the local one in the published proportion."""
        side = int(self.sam.image_size)
        return {path: side * pixels // self.published_sides[GLOBAL] for path, pixels in self.published_sides.items()}

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    def patches_of(self, side: int) -> int:
        """Patches of SAM."""
        return int(side // self.sam.patch_size) ** 2

    def features_of(self, side: int) -> int:
        """SAM's features along a side of a tile: each stands for 4 patches, a rest counts as one.

        Raises:
            InputError: the tile is no whole number of patches.
        """
        if side < 1 or side % self.sam.patch_size:
            raise InputError(
                f"a tile of {side}x{side} pixels; {self.model_type} takes multiples of {self.sam.patch_size}"
            )
        return -(-(side // int(self.sam.patch_size)) // SAM_MERGE)

    def stock_features(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """SAM converts no pixels: they go in with the type of its weights."""
        dtype = model.multi_modal_projector.weight.dtype
        return super().stock_features(
            model, {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        )

    # forward

    def attend(self, tower: Any) -> AbstractContextManager[None]:
        """`auto` keeps the tower's own attention unless FlashAttention 4 is there, a named one replaces it."""
        return use_varlen_on_tiles(tower.config, self.attention, self.weight)


class DeepseekOcr(DeepEncoder):
    """DeepSeek-OCR."""

    model_type = "deepseek_ocr"
    parts = ("vision_tower", "multi_modal_projector", "image_newline", "view_separator")
    published_sides: ClassVar = {GLOBAL: 1024, LOCAL: 640}
    entry_points: ClassVar = {
        "get_image_features": ("pixel_values", "pixel_values_local", "num_local_patches", "patches_grid")
    }

    # sizes

    def tokens_of(self, side: int) -> int:
        """One a feature of SAM."""
        return self.features_of(side) ** 2

    def grids_of(self, given: Mapping[str, Any], num_items: int | None) -> tuple[Grid, ...]:
        """`patches_grid` has columns and rows; `num_local_patches` may be left out where it follows from them."""
        if "patches_grid" not in given:
            if any(local_counts(given.get("num_local_patches"), num_items)):
                raise InputError("local tiles need patches_grid, columns and rows of each image's tiles; give it too")
            return super().grids_of(given, num_items)
        table = host_rows("patches_grid", given["patches_grid"], 2)
        counts = [0 if row == [1, 1] else row[0] * row[1] for row in table]
        stated = local_counts(given.get("num_local_patches", counts), num_items)
        if len(stated) != len(table) or any(n not in (0, c * r) for n, (c, r) in zip(stated, table, strict=False)):
            raise InputError(f"num_local_patches={stated} and patches_grid={table} disagree")
        return tuple(Grid(1, r, c) if n else Grid(1, 0, 0) for n, (c, r) in zip(stated, table, strict=True))

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """And `patches_grid`, which is 1 x 1 for an image without local tiles."""
        table = [[max(grid.w, 1), max(grid.h, 1)] for grid in grids]
        return {**super().example_inputs(grids, generator), "patches_grid": torch.tensor(table)}

    def order(self, grid: Grid, global_tokens: int, local_tokens: int) -> Int64:
        """Local tiles as one picture, then the global view, a newline behind every row; then the separator."""
        local_rows = grid.num_patches * local_tokens
        newline = global_tokens + local_rows
        views = [_with_newlines(np.arange(global_tokens, dtype=np.int64).reshape(_square(global_tokens)), newline)]
        if grid.num_patches:
            down, across = _square(local_tokens)
            tiles = np.arange(global_tokens, newline, dtype=np.int64).reshape(grid.h, grid.w, down, across)
            views.insert(0, _with_newlines(tiles.swapaxes(1, 2).reshape(grid.h * down, -1), newline))
        return np.concatenate([*views, np.array([newline + 1])])

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of SAM and of CLIP."""
        tower = self.own.vision_tower
        return [*tower.sam_encoder.layers, *tower.vision_encoder.encoder.layers]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """SAM, CLIP over its features, both side by side, projected: `(tiles * tokens, hidden)`.

        Position tables are resized in here, so that they are those of the weights at all times.
        """
        tower = self.own.vision_tower
        features = sam_features(tower.sam_encoder, buffers.pixels)
        encoder = tower.vision_encoder
        hidden = encoder.pre_layrnorm(encoder.embeddings(features))
        with self.attend(encoder):
            for layer in encoder.encoder.layers:
                hidden = layer(hidden, None)
        both = torch.cat([hidden[:, 1:], features.flatten(2).transpose(1, 2)], dim=-1)
        return (self.own.multi_modal_projector(both).flatten(0, 1),)

    def delimiters(self) -> Sequence[Tensor]:
        """The newline and the separator."""
        return self.own.image_newline[None], self.own.view_separator[None]


def _square(tokens: int) -> tuple[int, int]:
    side = round(tokens**0.5)
    return side, side


def _with_newlines(rows: Int64, newline: int) -> Int64:
    return np.pad(rows, ((0, 0), (0, 1)), constant_values=newline).ravel()
