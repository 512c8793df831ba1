"""LFM3-VL: the tower's layers over packed patches, their convolutions as sums over neighbours.

Checkpoint: `LiquidAI/LFM3-VL-2B`. Reference: `modeling_lfm3_vl.py` of transformers 5.24; 5.17 has no such model. Most
layers are gated depthwise 3x3 convolutions over the patches of one frame, the others attention in groups (two query
heads a key head) inside one frame. transformers convolves item by item, with sizes read on the host; here each patch
has the rows of its nine neighbours, and a neighbour outside the frame counts as zero. All else in a layer is its own.

Capacity rule: see `PackedAdapter`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from onereplay import geometry
from onereplay.adapters.grids import GridAdapter
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.geometry import Grid


class Lfm3VL(GridAdapter):
    """LFM3-VL."""

    model_type = "lfm3_vl"
    parts = ("vision_tower", "multi_modal_projector")

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        for layer in self.own.vision_tower.layers if model is not None else ():
            if not layer.is_attention_layer:
                layer.conv.forward = MethodType(_convolution, layer.conv)

    # sizes

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @cached_property
    def kernel(self) -> int:
        """The side of the convolutions' kernels, in patches: 3 as published."""
        return int(self.config.vision_config.conv_kernel_size)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels and places in merged order, and how far each neighbour of a patch is from it."""
        return (
            Staged("pixels", "patches", self.pixel_shape),
            Rows("position_ids", "patches", width=2),
            Rows("neighbour_steps", "patches", width=self.kernel**2, dtype=torch.int32),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The tower's metadata for one grid; steps between rows are the same wherever the grid lies in the batch."""
        return {
            "position_ids": geometry.merged_positions(grid, self.merge),
            "neighbour_steps": geometry.neighbour_steps(grid, self.merge, self.kernel),
            "cu_seqlens": geometry.frame_lengths(grid),
        }

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """All layers; those with a convolution compile to one variant, those with attention to another."""
        return self.own.vision_tower.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Embed, run the layers with offsets and neighbours, merge and project: `(tokens, hidden)`."""
        tower, neighbours = self.own.vision_tower, neighbour_rows(buffers.neighbour_steps)
        hidden = tower.embedding_norm(tower.patch_embed(buffers.pixels))
        rotation = tower.rotary_pos_emb(hidden, buffers.position_ids)
        with use_varlen(tower.config, self.attention):
            for layer in tower.layers:
                hidden = layer(
                    hidden,
                    position_embeddings=rotation,
                    cu_seqlens=buffers.cu_seqlens,
                    max_seqlen=bounds["cu_seqlens"],
                    grid_thw=neighbours,
                )
        return (self.own.multi_modal_projector(hidden),)


def neighbour_rows(steps: Tensor) -> Tensor:
    """From steps, int32 `(P, kernel**2)`, to rows of the batch, int64 of the same shape; -1 for what lies outside."""
    own = torch.arange(len(steps), device=steps.device).unsqueeze(1)
    return torch.where(steps == geometry.OUTSIDE, -1, own + steps)


def _convolution(self: Any, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Tensor:
    """`forward` of the tower's convolution (`self`), on rows.

    Args:
        hidden_states: `(P, C)`.
        grid_thw: `neighbour_rows`, in the kernel's order. The layer hands this argument on as it comes.

    The products add up in fp32, as in the convolution. A sum over columns, not one gather of all neighbours: compiled
    it becomes one kernel that stores nothing in between. What lies outside is left out by `where`: row -1 is padding,
    which may hold NaN.
    """
    input_gate, output_gate, values = self.in_proj(hidden_states).chunk(3, dim=-1)
    gated = input_gate * values
    taps = self.spatial_conv.weight.flatten(1).float()
    total = torch.zeros_like(gated, dtype=torch.float32)
    for tap, rows in enumerate(grid_thw.unbind(1)):
        inside = torch.where(rows.unsqueeze(1) >= 0, gated[rows], 0.0)
        total = total + inside.float() * taps[:, tap]
    projected: Tensor = self.out_proj(output_gate * total.to(gated.dtype))
    return projected
