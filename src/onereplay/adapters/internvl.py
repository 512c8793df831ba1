"""InternVL3 and 3.5: fixed tiles through the tower's own forward, the model's pixel shuffle and projector.

Checkpoints: `OpenGVLab/InternVL3-{1B,2B,8B,14B,38B,78B}-hf`, `OpenGVLab/InternVL3_5-{1B,2B,4B,8B,14B,38B,30B-A3B,
241B-A28B}-HF`; those of 38B, 78B and 241B have a tower of 6B with other norms. Reference: `modeling_internvl.py` of
transformers 5.24 (also run with 5.17). The stock `get_image_features` does the same, but in 5.24 it keeps hidden states
on the way. An image is 1 to 13 tiles, a video one tile a frame.

Capacity rule: see `TileAdapter`. A tile of 448 pixels is 1,025 rows in the tower and 256 tokens behind it. Tiles of
another size run eagerly, where the tower interpolates its positions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay.adapters.tiles import TileAdapter
from onereplay.core.buffers import Buffers
from onereplay.core.items import Modality
from onereplay.errors import InputError, UnsupportedModelError


class InternVL(TileAdapter):
    """InternVL3."""

    model_type = "internvl"
    parts = ("vision_tower", "multi_modal_projector")
    modalities = (Modality.IMAGE, Modality.VIDEO)
    size_names = ("num_patches", "num_frames")
    entry_points: ClassVar = {"get_image_features": ("pixel_values",)}

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if config.vision_feature_layer != -1 or config.vision_feature_select_strategy != "default":
            raise UnsupportedModelError(
                f"internvl with vision_feature_layer={config.vision_feature_layer} and vision_feature_select_strategy="
                f"{config.vision_feature_select_strategy!r} is not supported; use -1 and 'default', as published"
            )

    # sizes

    @cached_property
    def tile_shape(self) -> tuple[int, int, int]:
        """3 x 448 x 448 in the published checkpoints."""
        vision = self.config.vision_config
        height, width = vision.image_size
        return int(vision.num_channels), int(height), int(width)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    def tokens_of(self, height: int, width: int) -> int:
        """A quarter of the patches: the pixel shuffle merges `1 / downsample_ratio` patches a side."""
        merge = round(1 / float(self.config.downsample_ratio))
        rows, columns = self._grid(height, width)
        if rows != columns or rows % merge or rows == 0:
            raise InputError(
                f"a tile of {height}x{width} pixels is {rows}x{columns} patches; {self.model_type} needs a square "
                f"whose side is a multiple of {merge} patches"
            )
        return (rows // merge) * (columns // merge)

    def patches_of(self, height: int, width: int) -> int:
        """The patches and the class token."""
        rows, columns = self._grid(height, width)
        return rows * columns + 1

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        down, across = (int(side) for side in self.config.vision_config.patch_size)
        return height // down, width // across

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.own.vision_tower.encoder.layer  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Tower, pixel shuffle, projector: `(tiles * tile_tokens, hidden)`."""
        tower = self.own.vision_tower
        with self.own_attention(tower.config):
            rows = tower(
                pixel_values=buffers.pixels, output_hidden_states=False, output_attentions=False, return_dict=True
            ).last_hidden_state[:, 1:]
            tiles, patches, width = rows.shape
            side = math.isqrt(patches)
            square = rows.reshape(tiles, side, side, width)
            merged = self.model.pixel_shuffle(square, scale_factor=self.config.downsample_ratio)
            features: Tensor = self.own.multi_modal_projector(merged.flatten(1, 2))
        return (features.flatten(0, 1),)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is one tensor, `(tiles, tile_tokens, hidden)`."""
        return BaseModelOutputWithPooling(pooler_output=torch.stack(list(features)))
