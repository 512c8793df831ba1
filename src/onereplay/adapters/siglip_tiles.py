"""What language models with a SigLIP tower of one tile size share: Gemma 3 and DeepSeek-VL.

Reference: `modeling_siglip.py` of transformers 5.24 (also run with 5.17). The tower's own forward also runs a pooling
head where the configuration has one, which no language model reads, and in 5.24 may collect hidden states; so the
embeddings, the layers and the last norm are called one after the other, unmodified.

Capacity rule: see `TileAdapter`. The tower has positions for one size, so a tile of another size is an `InputError`.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay.adapters.tiles import TileAdapter
from onereplay.core.items import Modality
from onereplay.errors import UnsupportedModelError


class SiglipTiles(TileAdapter):
    """Square tiles through SigLIP."""

    modalities = (Modality.IMAGE,)

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if config.vision_config.model_type != "siglip_vision_model":
            raise UnsupportedModelError(
                f"{self.model_type} with a {config.vision_config.model_type!r} tower is not supported; use "
                f"siglip_vision_model"
            )

    @property
    @abstractmethod
    def tower(self) -> Any:
        """The tower that `forward` runs."""

    @cached_property
    def tile_shape(self) -> tuple[int, int, int]:
        """3 channels in the published checkpoints."""
        vision = self.config.vision_config
        return int(vision.num_channels), int(vision.image_size), int(vision.image_size)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    def tokens_of(self, height: int, width: int) -> int:
        """Every patch is a token; a model that pools them says so."""
        return self.patches_of(height, width)

    def patches_of(self, height: int, width: int) -> int:
        """Whole patches of the one size."""
        self.refuse_other_sizes(height, width)
        return int((self.tile_shape[1] // self.config.vision_config.patch_size) ** 2)

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.tower.encoder.layers  # type: ignore[no-any-return]

    def tower_rows(self, pixels: Tensor) -> Tensor:
        """`(tiles, channels, side, side)` to the tower's `(tiles, patches, width)`, behind its last norm."""
        hidden: Tensor = self.tower.embeddings(pixels)
        with self.own_attention(self.tower.config):
            for layer in self.tower.encoder.layers:
                hidden = layer(hidden, None)
        rows: Tensor = self.tower.post_layernorm(hidden)
        return rows

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is one tensor, `(tiles, tile_tokens, hidden)`."""
        return BaseModelOutputWithPooling(pooler_output=torch.stack(list(features)))
