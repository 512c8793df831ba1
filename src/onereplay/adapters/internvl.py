"""InternVL3 and 3.5: fixed tiles through the stock `get_image_features`.

Checkpoints: `OpenGVLab/InternVL3-{1B,2B,8B,14B,38B,78B}-hf`. Reference: `modeling_internvl.py` of transformers 5.24
(also run with 5.17). Tower, pixel shuffle and projector are the model's own method, which reads nothing on the
host. An image is 1 to 13 tiles, a video one tile a frame.

Capacity rule: see `TileAdapter`. A tile of 448 pixels is 1,025 rows in the tower and 256 tokens behind it. Tiles of
another size run eagerly, where the tower interpolates its positions.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay.adapters.tiles import TileAdapter
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Buffers
from onereplay.core.items import Modality
from onereplay.errors import InputError


class InternVL(TileAdapter):
    """InternVL3."""

    model_type = "internvl"
    parts = ("vision_tower", "multi_modal_projector")
    modalities = (Modality.IMAGE, Modality.VIDEO)
    entry_points: ClassVar = {"get_image_features": ("pixel_values",)}

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
        return self.model.vision_tower.encoder.layer  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The stock method: `(tiles * tile_tokens, hidden)`. `auto` keeps its attention, a named one replaces it."""
        config = self.model.vision_tower.config
        attention = nullcontext() if self.attention == "auto" else use_varlen(config, self.attention, tiles=True)
        with attention, self.rewritten:
            output = self.model.get_image_features(
                buffers.pixels, output_hidden_states=False, output_attentions=False, return_dict=True
            )
        return (output.pooler_output.flatten(0, 1),)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is one tensor, `(tiles, tile_tokens, hidden)`."""
        return BaseModelOutputWithPooling(pooler_output=torch.stack(list(features)))
