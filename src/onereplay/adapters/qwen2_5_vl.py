"""Qwen2.5-VL: the tower's own forward with precomputed metadata.

Checkpoints: `Qwen/Qwen2.5-VL-{3B,7B,32B,72B}-Instruct`. Reference: `modeling_qwen2_5_vl.py` of transformers 5.24 (also
run with 5.17). Windows of 8x8 patches, full attention in the layers of `fullatt_block_indexes`; the tower runs in
window order and puts the tokens back at its end. Images and videos go through the same tower, one sequence a frame.

Capacity rule: see `PackedAdapter`. A budget of T tokens has `T // 8 + sequences` slots for real windows. A window holds
up to 16 tokens; pictures whose sides are not multiples of it need more (25 tokens of 5x5 make 4 windows), and where a
batch of very thin pictures needs more still, it goes to a larger budget.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from onereplay import geometry
from onereplay.adapters.grids import GridAdapter
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged, Tail
from onereplay.core.items import PathSize
from onereplay.geometry import Grid

TOKENS_PER_WINDOW_SLOT = 8


class Qwen25VL(GridAdapter):
    """Qwen2.5-VL."""

    model_type = "qwen2_5_vl"

    # sizes

    @cached_property
    def window(self) -> int:
        """The side of a window in merged units."""
        vision = self.config.vision_config
        return int(vision.window_size // vision.spatial_merge_size // vision.patch_size)

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
            Staged("pixels", "patches", self.pixel_shape),
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

    # forward

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's own forward, given its windows too: `(tokens, hidden)`."""
        output = self.run_tower(
            buffers,
            bounds,
            window_index=buffers.window_index,
            cu_window_seqlens=buffers.cu_window_seqlens,
            max_window_seqlen=bounds["cu_window_seqlens"],
        )
        return (output.pooler_output,)
