"""Qwen2-VL: the tower's own forward with precomputed metadata.

Checkpoints: `Qwen/Qwen2-VL-{2B,7B,72B}-Instruct`. Reference: `modeling_qwen2_vl.py` of transformers 5.24 (also run with
5.17). One tower for all sizes; only the width behind its merger differs, and that is what the vision configuration
calls `hidden_size` (the tower's own is `embed_dim`). Images and videos go through it alike, one sequence a frame.

Capacity rule: see `PackedAdapter`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from torch import Tensor, nn

from onereplay import geometry
from onereplay.adapters.grids import UNUSED_GRID, GridAdapter
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.geometry import Grid


class Qwen2VL(GridAdapter):
    """Qwen2-VL."""

    model_type = "qwen2_vl"

    # sizes

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width, under the name that Qwen2-VL gives it."""
        return int(self.config.vision_config.hidden_size)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in merged order, and what the tower's forward would compute from the grids."""
        return (
            Staged("pixels", "patches", self.pixel_shape),
            Rows("position_ids", "patches", width=2),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The tower's metadata for one grid."""
        return {
            "position_ids": geometry.merged_positions(grid, self.merge),
            "cu_seqlens": geometry.frame_lengths(grid),
        }

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
                grid_thw=UNUSED_GRID,
                position_ids=buffers.position_ids,
                cu_seqlens=buffers.cu_seqlens,
                max_seqlen=bounds["cu_seqlens"],
                output_hidden_states=False,
                output_attentions=False,
                return_dict=True,
            )
        return (output.pooler_output,)
