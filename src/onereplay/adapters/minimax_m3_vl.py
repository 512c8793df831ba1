"""MiniMax-M3: the tower's own forward with precomputed metadata, and the model's projector.

Checkpoint: `MiniMaxAI/MiniMax-M3`. Reference: `modeling_minimax_m3_vl.py` of transformers 5.24. A video is one
sequence, all of its frames attend to each other, and its positions have three axes (the processor cuts a long video
into clips of four frames, each with a grid of its own). The projector works on patches first and on units of 2x2
patches afterwards.

The tower of transformers 5.17 is refused: it rotates by frame and row, not by column, and lets all images of a call
attend to each other.

Capacity rule: see `PackedAdapter`; a clip of any number of frames takes one sequence slot.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from onereplay import geometry
from onereplay.adapters.grids import GridAdapter
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import PathSize
from onereplay.errors import UnsupportedModelError
from onereplay.geometry import Grid


class MiniMaxM3VL(GridAdapter):
    """MiniMax-M3."""

    model_type = "minimax_m3_vl"
    parts = ("vision_tower", "multi_modal_projector")

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        if model is not None and not _is_right(model.vision_tower):
            raise UnsupportedModelError(
                f"the tower of minimax_m3_vl in transformers {transformers.__version__} gives other features than the "
                f"published one (two axes of positions instead of three, attention across images); install a newer "
                f"one: 5.24 is right"
            )
        super().__init__(config, model, attention, optimize)

    # sizes

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @property
    def tower(self) -> Any:
        """The copy that `forward` runs."""
        return self.own.vision_tower

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """One row of `pixel_values`: the values of a patch."""
        vision = self.config.vision_config
        return (int(vision.num_channels * vision.temporal_patch_size * vision.patch_size**2),)

    def size(self, grid: Grid) -> PathSize:
        """One sequence an image or clip."""
        tokens = grid.num_patches // self.merge**2
        return PathSize(tokens, grid.num_patches, sequences=1, longest=grid.num_patches)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in merged order, and what the tower's forward would compute from the grids."""
        return (
            Staged("pixels", "patches", self.pixel_shape),
            Rows("position_ids", "patches", width=3),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The tower's metadata for one grid."""
        return {
            "position_ids": geometry.clip_positions(grid, self.merge),
            "cu_seqlens": geometry.clip_lengths(grid),
        }

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """All 32."""
        return self.tower.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's own forward, then the projector: `(tokens, hidden)`."""
        rows = self.run_tower(buffers, bounds).last_hidden_state
        return (self.own.multi_modal_projector(rows.squeeze(0)),)


def _is_right(tower: Any) -> bool:
    """Whether a tower of this transformers keeps clips apart and rotates by all three axes."""
    attention = next(iter(tower.layers)).self_attn
    angles = tower.rotary_emb.recomposition_frequencies(torch.zeros(1, 3, 1))
    return "cu_seqlens" in inspect.signature(attention.forward).parameters and angles.shape[-1] == 6
