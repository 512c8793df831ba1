"""Qwen2.5-VL: the tower's own forward with precomputed metadata.

Checkpoints: `Qwen/Qwen2.5-VL-{3B,7B,32B,72B}-Instruct`. Reference: `modeling_qwen2_5_vl.py` of transformers 5.24 (also
run with 5.17). Windows of 8x8 patches, full attention in the layers of `fullatt_block_indexes`; the tower runs in
window order and puts the tokens back at its end. Images and videos go through the same tower, one sequence a frame.

Capacity rule: see `PackedAdapter`. A budget of T tokens has `T // 8 + sequences` slots for real windows. A window holds
up to 16 tokens; pictures whose sides are not multiples of it need more (25 tokens of 5x5 make 4 windows), and where a
batch of very thin pictures needs more still, it goes to a larger budget.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.base import host_rows, refuse_unknown
from onereplay.adapters.packed import PackedAdapter, PackedBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged, Tail
from onereplay.core.items import Item, Modality, PathSize
from onereplay.errors import InputError
from onereplay.geometry import Grid

TOKENS_PER_WINDOW_SLOT = 8
_KINDS = (
    (Modality.IMAGE, "pixel_values", "image_grid_thw"),
    (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
)


class Qwen25VL(PackedAdapter):
    """Qwen2.5-VL."""

    model_type = "qwen2_5_vl"
    parts = ("visual",)
    modalities = (Modality.IMAGE, Modality.VIDEO)
    entry_points: ClassVar = {
        "get_image_features": ("pixel_values", "image_grid_thw"),
        "get_video_features": ("pixel_values_videos", "video_grid_thw"),
    }

    # sizes

    @cached_property
    def merge(self) -> int:
        """2 in every published checkpoint."""
        return int(self.config.vision_config.spatial_merge_size)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.vision_config.out_hidden_size)

    @cached_property
    def window(self) -> int:
        """The side of a window in merged units."""
        vision = self.config.vision_config
        return int(vision.window_size // vision.spatial_merge_size // vision.patch_size)

    @cached_property
    def patch_dim(self) -> int:
        """Values of one patch row."""
        vision = self.config.vision_config
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    def size(self, grid: Grid) -> PathSize:
        """One sequence a frame, and the windows of each frame."""
        size = super().size(grid)
        down, across = (-(-(side // self.merge) // self.window) for side in grid[1:])
        return PathSize(size.tokens, size.patches, size.sequences, grid.t * down * across, size.longest)

    def windows_capacity(self, tokens: int, sequences: int) -> int:
        """See the module's capacity rule."""
        return -(-tokens // TOKENS_PER_WINDOW_SLOT) + sequences

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in merged order, and what the tower's forward would compute from the grids."""
        window_patches = (self.window * self.merge) ** 2
        return (
            Staged("pixels", "patches", (self.patch_dim,)),
            Rows("position_ids", "patches", width=2),
            Rows("window_index", "tokens", shift="tokens", tail=Tail.IDENTITY),
            Offsets("cu_seqlens", of="sequences"),
            Offsets("cu_window_seqlens", of="windows", longest_dummy=window_patches),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The tower's metadata for one grid."""
        return {
            "position_ids": geometry.merged_positions(grid, self.merge),
            "window_index": geometry.window_order(grid, self.window, self.merge),
            "cu_seqlens": geometry.frame_lengths(grid),
            "cu_window_seqlens": geometry.window_lengths(grid, self.window, self.merge),
        }

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `image_grid_thw` and `video_grid_thw`."""
        given = refuse_unknown(sizes, [table for _, _, table in _KINDS], self.model_type)
        return tuple(
            self.item(modality, [grid])
            for modality, _, table in _KINDS
            if table in given
            for grid in self._grids(table, given[table])
        )

    def batch(self, **inputs: Any) -> PackedBatch:
        """From `pixel_values` `(P, patch_dim)` and `image_grid_thw` `(N, 3)`, and the same pair for videos.

        Images come first, then videos.
        """
        given = refuse_unknown(inputs, [name for kind in _KINDS for name in kind[1:]], self.model_type)
        return self.join([self._of_kind(given, *kind) for kind in _KINDS if {*kind[1:]} & given.keys()])

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Grids of one frame are images, others videos."""
        inputs = {}
        for modality, pixels, table in _KINDS:
            chosen = [grid for grid in grids if (grid.t > 1) == (modality is Modality.VIDEO)]
            if chosen:
                rows = sum(grid.num_patches for grid in chosen)
                inputs[pixels] = torch.randn(rows, self.patch_dim, generator=generator, device=generator.device)
                inputs[table] = torch.tensor(chosen)
        return inputs

    def _of_kind(self, given: Mapping[str, Any], modality: Modality, pixels: str, table: str) -> PackedBatch:
        if pixels not in given or table not in given:
            raise InputError(f"{pixels} and {table} come together; give both")
        grids = self._grids(table, given[table])
        items = tuple(self.item(modality, [grid]) for grid in grids)
        expected = (sum(grid.num_patches for grid in grids), self.patch_dim)
        if tuple(given[pixels].shape) != expected:
            raise InputError(f"{pixels} has shape {tuple(given[pixels].shape)}, {table} asks for {expected}")
        return PackedBatch(items, grids, (given[pixels],))

    def _grids(self, table: str, value: Any) -> tuple[Grid, ...]:
        grids = tuple(Grid(*row) for row in host_rows(table, value, 3))
        odd = next((grid for grid in grids if grid.h % self.merge or grid.w % self.merge), None)
        if odd is not None:
            raise InputError(f"{table} has {tuple(odd)}; height and width must be multiples of {self.merge} patches")
        return grids

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """All 32."""
        return self.own.visual.blocks  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's own forward: `(tokens, hidden)`."""
        tower = self.own.visual
        with use_varlen(tower.config, self.attention):
            output = tower(
                buffers.pixels,
                grid_thw=_UNUSED_GRID,
                position_ids=buffers.position_ids,
                window_index=buffers.window_index,
                cu_seqlens=buffers.cu_seqlens,
                max_seqlen=bounds["cu_seqlens"],
                cu_window_seqlens=buffers.cu_window_seqlens,
                max_window_seqlen=bounds["cu_window_seqlens"],
                output_hidden_states=False,
                output_attentions=False,
                return_dict=True,
            )
        return (output.pooler_output,)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a tuple, one tensor an item."""
        return BaseModelOutputWithPooling(pooler_output=tuple(features))


_UNUSED_GRID = torch.zeros(1, 3, dtype=torch.int64)
"""The tower reads its grids only for metadata that it was not given."""
