"""Qwen3-VL and its mixture of experts: the tower's own forward with precomputed metadata.

Checkpoints: `Qwen/Qwen3-VL-{2B,4B,8B,32B}-Instruct`, `Qwen/Qwen3-VL-{30B-A3B,235B-A22B}-Instruct`, and `-Thinking`.
Reference: `modeling_qwen3_vl.py` and `modeling_qwen3_vl_moe.py` of transformers 5.24 (also run with 5.17); the vision
towers of both are the same. A learned square table of positions is resampled to each grid, its four taps a patch come
with the batch. Images and videos go through the same tower, one sequence a frame.

Some layers' outputs are merged as well and go to the first layers of the language model (deepstack). A token's row is
all of it side by side: the tower's output first, then the levels from the lowest layer up.

Capacity rule: see `PackedAdapter`.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe

from onereplay import geometry
from onereplay.adapters.grids import GridAdapter
from onereplay.adapters.interpolation import sum_taps
from onereplay.core.buffers import Array, Buffers, Declaration, Rows
from onereplay.geometry import Grid


class Qwen3Tower(GridAdapter):
    """What Qwen3-VL and Qwen3.5 share."""

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if model is not None:
            self._table = self.own.visual.pos_embed
            self.own.visual.pos_embed = nn.Identity()

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """And the taps of each patch in the table of positions."""
        return (
            *super().buffers(),
            Rows("tap_indices", "patches", width=4, dtype=torch.int32),
            Rows("tap_weights", "patches", width=4, dtype=torch.float32),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The tower's metadata for one grid."""
        side = math.isqrt(self.config.vision_config.num_position_embeddings)
        indices, weights = geometry.bilinear_taps(grid, side, self.merge)
        return {**super().piece(grid), "tap_indices": indices, "tap_weights": weights}

    # forward

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's own forward: `(tokens, hidden)`.

        The tower would look its table up at every tap and sum afterwards. Its `pos_embed` is the identity here: what it
        is given in place of indices are the sums, one "tap" a patch, with a weight of one.
        """
        positions = sum_taps(self._table.weight, buffers.tap_indices, buffers.tap_weights)
        output = self.run_tower(
            buffers, bounds, interp_indices=positions.unsqueeze(1), interp_weights=positions.new_ones(1, 1)
        )
        return (self.token_rows(output),)

    def token_rows(self, output: Any) -> Tensor:
        """The rows of an output of the tower: `(tokens, hidden_size)`."""
        rows: Tensor = output.pooler_output
        return rows


class Qwen3VL(Qwen3Tower):
    """Qwen3-VL."""

    model_type = "qwen3_vl"
    output_type: ClassVar[type] = modeling_qwen3_vl.BaseModelOutputWithDeepstackFeatures

    @property
    def num_parts(self) -> int:
        """The tower's output and the deepstack levels."""
        return 1 + len(self.config.vision_config.deepstack_visual_indexes)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width, once for each part."""
        return int(self.config.vision_config.out_hidden_size) * self.num_parts

    def token_rows(self, output: Any) -> Tensor:
        """Output and levels side by side."""
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """Apart again: `pooler_output` is a tuple, one tensor an item, and `deepstack_features` a list of the levels,
        each a tuple like it (in transformers 5.17 one tensor of all items)."""
        counts = [len(rows) for rows in features]
        pooled, *levels = torch.cat(list(features)).unflatten(-1, (self.num_parts, -1)).transpose(0, 1).contiguous()
        return self.output_type(
            pooler_output=pooled.split(counts),
            deepstack_features=[level.split(counts) for level in levels] if self.splits_levels else levels,
        )

    def stock_rows(self, output: Any) -> list[Tensor]:
        """Each item's output and levels side by side."""
        counts = [len(rows) for rows in output.pooler_output]
        levels = [torch.cat(level) if self.splits_levels else level for level in output.deepstack_features]
        return list(torch.cat([torch.cat(output.pooler_output), *levels], dim=-1).split(counts))

    @cached_property
    def splits_levels(self) -> bool:
        """Whether the stock method splits the levels by item: whether its code names them at all."""
        stock = inspect.unwrap(type(self.model).get_image_features)
        return "deepstack_features" in stock.__code__.co_names


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL with a mixture of experts behind the same tower."""

    model_type = "qwen3_vl_moe"
    output_type = modeling_qwen3_vl_moe.BaseModelOutputWithDeepstackFeatures
