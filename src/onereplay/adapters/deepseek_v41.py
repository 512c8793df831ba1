"""DeepSeek-V4.1: packed patches through a tower of our own, 3x3 patches a token, and a gather of spans.

Checkpoint: `deepseek-ai/DeepSeek-V4.1-Flash`. transformers has no such tower; ours is `onereplay.models.deepseek_v41`,
whose plain `get_image_features` is what results are compared with. An image is one sequence, in raster order, of any
grid; squares at its right and lower edge may be filled up with zeros. Its result is a span: a learned start, the tokens
of each row and a learned newline, a learned end.

Capacity rule: see `PackedAdapter`; budgets count tokens of the aligner, delimiters come in at the end. An image of the
processor has at most `max_image_tokens` rows in its span, which bounds `max_seqlen`: one row of all but three of them.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.base import host_rows, refuse_unknown
from onereplay.adapters.packed import PATH, PackedAdapter, PackedBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.assembly import gather_rows
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import Item, Modality, PathSize
from onereplay.errors import InputError
from onereplay.geometry import Grid
from onereplay.geometry.grids import Int64

_INPUTS = ("patches", "vit_grid", "llm_grid", "types")
_DELIMITERS = ("image_start", "image_newline", "image_end")
_START, _NEWLINE, _END = range(3)
"""Rows of the pool that hold delimiters."""


class DeepseekV41(PackedAdapter):
    """DeepSeek-V4.1."""

    model_type = "deepseek_v41"
    parts = ("vision", "aligner", *_DELIMITERS)
    modalities = (Modality.IMAGE,)
    entry_points: ClassVar = {"get_image_features": _INPUTS[:2]}

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        most_tokens = int(config.vision_config.max_image_tokens) - 3
        self.max_sequence_patches = most_tokens * self.merge**2
        self._index = functools.lru_cache(256)(self._span)

    # sizes

    @cached_property
    def merge(self) -> int:
        """3 in the published checkpoint."""
        return int(self.config.vision_config.downsample_ratio)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @cached_property
    def pixel_shape(self) -> tuple[int, int, int]:
        """One patch."""
        side = int(self.config.vision_config.patch_size)
        return 3, side, side

    def size(self, grid: Grid) -> PathSize:
        """A square that is not full is a token too."""
        _, down, across = self._tokens(grid)
        return PathSize(down * across, grid.num_patches, sequences=1, longest=grid.num_patches)

    def _tokens(self, grid: Grid) -> Grid:
        return Grid(1, -(-grid.h // self.merge), -(-grid.w // self.merge))

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in raster order; each patch's place; the patches of each token, and which of them there are."""
        return (
            Staged("pixels", "patches", self.pixel_shape),
            Rows("positions", "patches", width=2, dtype=torch.int32),
            Rows("merge_gather", "tokens", width=self.merge**2, shift="patches"),
            Rows("merge_inside", "tokens", width=self.merge**2, dtype=torch.uint8),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """`merge_inside` is 1 where the square has a patch."""
        gather, inside = geometry.ragged_merge_gather(grid, self.merge)
        return {
            "positions": geometry.raster_positions(grid).astype(np.int32),
            "merge_gather": gather,
            "merge_inside": inside,
            "cu_seqlens": geometry.frame_lengths(grid),
        }

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `vit_grid`."""
        given = refuse_unknown(sizes, ("vit_grid",), self.model_type)
        return tuple(self.item(Modality.IMAGE, [grid]) for grid in _grids(given["vit_grid"])) if given else ()

    def item(self, modality: Modality, grids: Sequence[Grid]) -> Item:
        """And the rows of its span."""
        found = super().item(modality, grids)
        (grid,) = grids
        return Item(modality, found.sizes, rows=len(self._index(grid)))

    def batch(self, **inputs: Any) -> PackedBatch:
        """From `patches` `(P, 3, patch_size, patch_size)` and `vit_grid` `(images, 2)`, rows and columns of patches.

        `llm_grid` and `types`, which published processors give too, follow from the grid; they are checked.
        """
        given = refuse_unknown(inputs, _INPUTS, self.model_type)
        if not given:
            return PackedBatch((), (), ())
        if "patches" not in given or "vit_grid" not in given:
            raise InputError("patches and vit_grid come together; give both")
        grids, patches = _grids(given["vit_grid"]), given["patches"]
        if not isinstance(patches, Tensor):
            raise InputError(f"patches is a {type(patches).__name__}; give a tensor of PyTorch")
        items = tuple(self.item(Modality.IMAGE, [grid]) for grid in grids)
        expected = (sum(grid.num_patches for grid in grids), *self.pixel_shape)
        if tuple(patches.shape) != expected:
            raise InputError(f"patches has shape {tuple(patches.shape)}, vit_grid asks for {expected}")
        if "llm_grid" in given:
            tokens = [[*self._tokens(grid)[1:]] for grid in grids]
            if host_rows("llm_grid", given["llm_grid"], 2) != tokens:
                raise InputError(f"llm_grid does not follow from vit_grid, which asks for {tokens!r:.80}")
        if "types" in given and len(given["types"]) != (rows := sum(item.num_rows for item in items)):
            raise InputError(f"types has {len(given['types'])} entries, the spans of vit_grid have {rows} rows")
        return PackedBatch(items, grids, (patches,))

    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """The engine's, with squares at the edges that are not full in all but the first."""
        first, *others = super().layouts(path, tokens, max_items)
        return [first, *((name, [_ragged(grid, place) for place, grid in enumerate(grids)]) for name, grids in others)]

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Each grid is one image."""
        shape = (sum(grid.num_patches for grid in grids), *self.pixel_shape)
        return {
            "patches": torch.randn(shape, generator=generator, device=generator.device),
            "vit_grid": torch.tensor([grid[1:] for grid in grids]),
        }

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every block of the tower."""
        return self.own.vision.blocks  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower with offsets in place of a mask, gather squares, align: `(tokens, hidden)`."""
        tower = self.own.vision
        with use_varlen(tower.config, self.attention):
            hidden = tower(buffers.pixels, buffers.positions, buffers.cu_seqlens, bounds["cu_seqlens"])
        # A choice and no product: padding rows may hold NaN.
        units = torch.where(buffers.merge_inside.bool().unsqueeze(-1), hidden[buffers.merge_gather], 0)
        return (self.own.aligner(units),)

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: PackedBatch) -> list[Tensor]:
        """Each image's span."""
        counts = [item.num_tokens for item in batch.items]
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        indices = [
            geometry.placed(self._index(grid), start, len(_DELIMITERS))
            for grid, start in zip(batch.grids, starts, strict=True)
        ]
        delimiters = torch.stack([getattr(self.own, name) for name in _DELIMITERS])
        return gather_rows([delimiters, rows[PATH][0]], indices)

    def _span(self, grid: Grid) -> Int64:
        """The rows of one image, as `geometry.spans` says; kept for grids that come again."""
        _, down, across = self._tokens(grid)
        tokens = len(_DELIMITERS) + np.arange(down * across, dtype=np.int64).reshape(down, across)
        return np.concatenate([[_START], geometry.with_newlines(tokens, _NEWLINE), [_END]])

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a tuple, one tensor an image."""
        return BaseModelOutputWithPooling(pooler_output=tuple(features))


def _grids(vit_grid: Any) -> tuple[Grid, ...]:
    return tuple(Grid(1, *row) for row in host_rows("vit_grid", vit_grid, 2))


def _ragged(grid: Grid, place: int) -> Grid:
    """The same tokens from up to two rows and columns less."""
    return Grid(1, grid.h - place % 3, grid.w - (place + 1) % 3)
