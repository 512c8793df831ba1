"""LFM2-VL: SigLIP 2 (NaFlex) layers over packed patches, and the projector over gathered units.

Checkpoints: `LiquidAI/LFM2-VL-{450M,1.6B}`. Reference: `modeling_lfm2_vl.py` and `modeling_siglip2.py` of transformers
5.24 (also run with 5.17). The tower is that of `naflex.py`, one sequence a tile.

Capacity rule: see `PackedAdapter`; an image of the processor is at most 1,024 patches a tile, which bounds
`max_seqlen`; a longer sequence is an eager forward.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.naflex import NaflexAdapter
from onereplay.core.buffers import Array, Buffers, Declaration, Rows
from onereplay.errors import UnsupportedModelError
from onereplay.geometry import Grid


class Lfm2VL(NaflexAdapter):
    """LFM2-VL."""

    model_type = "lfm2_vl"
    parts = ("vision_tower", "multi_modal_projector")
    entry_points: ClassVar = {"get_image_features": ("pixel_values", "spatial_shapes", "pixel_attention_mask")}

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if config.vision_config.model_type != "siglip2_vision_model":
            raise UnsupportedModelError(
                f"lfm2_vl with a {config.vision_config.model_type!r} tower is not supported; use siglip2_vision_model"
            )

    # sizes

    @property
    def naflex(self) -> Any:
        """The tower."""
        return self.own.vision_tower

    @cached_property
    def merge(self) -> int:
        """2 in every published checkpoint."""
        return int(self.config.downsample_factor)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """The tower's, and the patches of each token."""
        return (*super().buffers(), Rows("merge_gather", "tokens", width=self.merge**2, shift="patches"))

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The tower's metadata, and the patches of each token."""
        return {**super().piece(grid), "merge_gather": geometry.merge_gather(grid, self.merge)}

    # forward

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's rows, gathered into units, projected: `(tokens, hidden)`."""
        hidden = self.rows(buffers, bounds)
        m = self.merge
        strip = buffers.merge_gather.view(-1, m, m).transpose(0, 1).reshape(m, -1)
        return (self.own.multi_modal_projector(hidden[strip].unsqueeze(0)).view(-1, self.hidden_size),)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a list, one tensor a tile."""
        return BaseModelOutputWithPooling(pooler_output=list(features))
