"""Gemma 3: one tile an image, and crops of it with pan-and-scan.

Checkpoints: `google/gemma-3-{4b,12b,27b}-{it,pt}`. Reference: `modeling_gemma3.py` of transformers 5.24 (also run with
5.17), `image_processing_gemma3.py` for the inputs. The projector pools 4x4 patches. With pan-and-scan an image is a
tile of the whole and up to `pan_and_scan_max_num_crops` crops; `num_crops` counts the crops alone.

Capacity rule: see `TileAdapter`. A tile of 896 pixels is 4,096 rows in the tower and 256 tokens behind it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from onereplay.adapters.base import host_integers
from onereplay.adapters.siglip_tiles import SiglipTiles
from onereplay.core.buffers import Buffers


class Gemma3(SiglipTiles):
    """Gemma 3."""

    model_type = "gemma3"
    parts = ("vision_tower", "multi_modal_projector")
    entry_points: ClassVar = {"get_image_features": ("pixel_values",)}
    size_names = ("num_patches", "num_crops")

    # sizes

    @property
    def tower(self) -> Any:
        """SigLIP so400m in the published checkpoints."""
        return self.own.vision_tower

    def tokens_of(self, height: int, width: int) -> int:
        """As many as the projector pools the patches to."""
        super().tokens_of(height, width)
        return int(self.config.mm_tokens_per_image**0.5) ** 2

    def image_counts(self, given: Mapping[str, Any]) -> Any:
        """The processor's `num_crops` and the image itself; `num_patches` comes first."""
        if "num_patches" in given or "num_crops" not in given:
            return super().image_counts(given)
        return [1 + crops for crops in host_integers("num_crops", given["num_crops"], 0)]

    # forward

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Tower and projector: `(tiles * tile_tokens, hidden)`."""
        features: Tensor = self.own.multi_modal_projector(self.tower_rows(buffers.pixels))
        return (features.flatten(0, 1),)
