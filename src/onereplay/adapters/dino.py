"""DINOv2 and DINOv3: the whole model is the tower; an image's embedding is its class token.

Checkpoints: `facebook/dinov2-{small,base,large,giant}`, `facebook/dinov3-vit{s,b,l}16-pretrain-lvd1689m` and larger.
Reference: `modeling_dinov2.py` and `modeling_dinov3_vit.py` of transformers 5.24 (also run with 5.17). Both take images
of any size: DINOv2 interpolates its table of positions, DINOv3 rotates by the places of the patches. Graphs are for one
size, images of another run eagerly; `tile_size` of the options sets it. `features="rows"` gives the class token, then
registers if there are any, then patches.

transformers keeps DINOv3's coordinates of patches in a cache of 32 sizes. A graph that reads a tensor of that cache
would read freed memory once 32 other sizes came by, so the adapter's own copy computes them in the graph.

DINOv2's configuration has the side of the position table (518); the published image processor crops to 224, and that
is what graphs are captured for by default.

Capacity rule: see `TileAdapter`. An image of 224 pixels is 257 rows in DINOv2 and 201 in DINOv3.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onereplay.adapters.towers import WholeTower, sides

PUBLISHED_CROP = 224
"""`crop_size` of DINOv2's published image processor."""


class Dinov2(WholeTower):
    """DINOv2."""

    model_type = "dinov2"
    classes = ("Dinov2Model",)
    any_size = True
    stock_arguments: ClassVar[dict[str, Any]] = {"bool_masked_pos": None, "attention_mask": None}

    @property
    def default_sides(self) -> tuple[int, int]:
        """The published processor's crop, or the position table's size where that is smaller."""
        height, width = sides(self.vision.image_size)
        return min(height, PUBLISHED_CROP), min(width, PUBLISHED_CROP)

    @property
    def prefix_rows(self) -> int:
        """The class token."""
        return 1

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.tower.encoder.layer  # type: ignore[no-any-return]


class Dinov3(WholeTower):
    """DINOv3 (ViT)."""

    model_type = "dinov3_vit"
    classes = ("DINOv3ViTModel",)
    any_size = True
    stock_arguments: ClassVar[dict[str, Any]] = {"bool_masked_pos": None}

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if model is not None:
            self.tower.rope_embeddings.forward = self.rotations

    def rotations(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the patches' places: `(patches, head size)` each, in the dtype of the pixels.

        A place is from -1 to 1 along each axis; each frequency rotates by the row, then each by the column, twice over.
        """
        down, across = sides(self.vision.patch_size)
        counts = pixel_values.shape[-2] // down, pixel_values.shape[-1] // across
        frequencies = self.tower.rope_embeddings.inv_freq
        places = [torch.arange(0.5, count, device=frequencies.device) * (2 / count) - 1 for count in counts]
        grid = torch.stack(torch.meshgrid(*places, indexing="ij"), dim=-1).flatten(0, 1)
        angles = (2 * math.pi * grid.unsqueeze(-1) * frequencies).flatten(1).tile(2)
        return angles.cos().to(pixel_values.dtype), angles.sin().to(pixel_values.dtype)

    @property
    def prefix_rows(self) -> int:
        """The class token and the registers."""
        return 1 + int(self.vision.num_register_tokens)

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.tower.model.layer  # type: ignore[no-any-return]
