"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: the tower's own forward with precomputed metadata.

Checkpoints: `zai-org/GLM-4.1V-9B-Thinking`, `zai-org/GLM-4.5V`, `zai-org/GLM-4.6V`, `zai-org/GLM-4.6V-Flash`,
`zai-org/GLM-OCR`. Reference: `modeling_glm4v.py`, `modeling_glm4v_moe.py`, `modeling_glm46v.py` and
`modeling_glm_ocr.py` of transformers 5.24 (also run with 5.17); the vision towers of the first three are the same.
Images and videos go through the same tower, one sequence a frame; a strided convolution merges 2x2 patches at its end.

A learned square table of positions is resampled to each grid by bicubic interpolation. The stock tower looks every
patch's frame up among the grids and samples the table there; here the sixteen taps of a patch come with the batch.
GLM-OCR has no table.

Capacity rule: see `PackedAdapter`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from onereplay import geometry
from onereplay.adapters.grids import GridAdapter
from onereplay.adapters.interpolation import sum_taps
from onereplay.core.buffers import Array, Buffers, Declaration, Rows
from onereplay.geometry import Grid


class GlmOcr(GridAdapter):
    """GLM-OCR."""

    model_type = "glm_ocr"


class Glm4v(GlmOcr):
    """GLM-4.1V, and GLM-4.6V-Flash as it is published."""

    model_type = "glm4v"

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if model is not None:
            self._table = self.own.visual.embeddings.position_embedding
            self.own.visual.embeddings = _AddPositions()

    # sizes

    @cached_property
    def table_side(self) -> int:
        """24 in every published checkpoint: the patches of an image of 336 pixels."""
        vision = self.config.vision_config
        return int(vision.image_size // vision.patch_size)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """And the taps of each patch in the table of positions."""
        return (
            *super().buffers(),
            Rows("tap_indices", "patches", width=16, dtype=torch.int32),
            Rows("tap_weights", "patches", width=16, dtype=torch.float32),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The tower's metadata for one grid."""
        indices, weights = geometry.bicubic_taps(grid, self.table_side, self.merge)
        return {**super().piece(grid), "tap_indices": indices, "tap_weights": weights}

    # forward

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's own forward: `(tokens, hidden)`.

        The tower hands its grids to its `embeddings` and reads nothing else from them: positions go in their place.
        """
        positions = sum_taps(self._table.weight, buffers.tap_indices, buffers.tap_weights)
        return (self.run_tower(buffers, bounds, grid_thw=positions).pooler_output,)


class Glm4vMoe(Glm4v):
    """GLM-4.5V and GLM-4.6V: a mixture of experts behind the same tower."""

    model_type = "glm4v_moe"


class Glm46V(Glm4v):
    """GLM-4.6V under the class of that name in transformers."""

    model_type = "glm46v"


class _AddPositions(nn.Module):
    """What stands in our copy of the tower for its `embeddings`, with the same parameters."""

    def forward(self, hidden: Tensor, lengths: Tensor, positions: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The rows of patches with their positions added: `(P, C)` each."""
        return hidden + positions
