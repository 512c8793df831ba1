"""DeepSeek-VL: one tile an image, every patch a token.

Checkpoints: `deepseek-community/deepseek-vl-1.3b-{chat,base}`. Reference: `modeling_deepseek_vl.py` of transformers
5.24 (also run with 5.17). The 7B has a second tower: `deepseek_vl_hybrid`.

Capacity rule: see `TileAdapter`. A tile of 384 pixels is 576 rows and 576 tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from onereplay.adapters.siglip_tiles import SiglipTiles
from onereplay.core.buffers import Buffers


class DeepseekVL(SiglipTiles):
    """DeepSeek-VL."""

    model_type = "deepseek_vl"
    parts: ClassVar[tuple[str, ...]] = ("vision_model", "aligner")
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"get_image_features": ("pixel_values",)}

    @property
    def tower(self) -> Any:
        """SigLIP large in the published checkpoints."""
        return self.own.vision_model

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Tower and aligner: `(tiles * tile_tokens, hidden)`."""
        features: Tensor = self.own.aligner(self.tower_rows(buffers.pixels))
        return (features.flatten(0, 1),)
