"""Step3 (`Step3VLForConditionalGeneration`, 321B): 63 layers, norms behind the sublayers, a class row four times.

Checkpoint: `stepfun-ai/step3`. Reference: `modeling_step3.py` of the checkpoint, as engines run it. Weights have the
published names here, so loading renames nothing: `vision_model.*`, `vit_downsampler*`, `vit_large_projector`. Four rows
instead of one class row take part in the attention, as published; none of them is in the result.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay.models.base import Attention, ComposedConfig, LanguageConfig, Mlp, OwnModel, resized_positions

CLASS_ROWS = 4
"""Copies of the class row in front of the patches."""


class Step3VisionConfig(PreTrainedConfig):  # type: ignore[misc]
    """The tower."""

    model_type = "step3_vision_encoder"

    hidden_size: int = 1792
    intermediate_size: int = 3072
    output_hidden_size: int = 4096
    num_hidden_layers: int = 63
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 728
    patch_size: int = 14
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    @property
    def side(self) -> int:
        """Positions along a side of the learned table."""
        return self.image_size // self.patch_size


class Step3Config(ComposedConfig):
    """The whole model. A stride of 2 makes the published 169 and 81 tokens."""

    model_type = "step3_vl"
    sub_configs: ClassVar = {"vision_config": Step3VisionConfig, "text_config": LanguageConfig}

    vision_config: Any = None
    text_config: Any = None
    understand_projector_stride: int = 1
    projector_bias: bool = True
    image_token_id: int = 128001


class Layer(nn.Module):
    """Attention and MLP, a norm behind each."""

    def __init__(self, config: Step3VisionConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(tiles, rows, width)` to the same."""
        hidden = hidden + self.layer_norm1(self.self_attn(hidden))
        return hidden + self.layer_norm2(self.mlp(hidden))  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    """Patches with positions behind the class rows; the table of positions is resized to a tile of another size."""

    def __init__(self, config: Step3VisionConfig) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(1, config.hidden_size))
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, config.patch_size, stride=config.patch_size
        )
        self.position_embedding = nn.Embedding(1 + config.side**2, config.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """`(tiles, channels, pixels, pixels)` to `(tiles, CLASS_ROWS + patches, width)`."""
        grid = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype))
        tiles, _, side, _ = grid.shape
        rows = torch.cat([self.class_embedding.expand(tiles, CLASS_ROWS, -1), grid.flatten(2).transpose(1, 2)], dim=1)
        positions = resized_positions(self.position_embedding.weight, side)
        return rows + torch.cat([positions[:1].expand(CLASS_ROWS, -1), positions[1:]])


class Encoder(nn.Module):
    """The layers."""

    def __init__(self, config: Step3VisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        """`(tiles, rows, width)` to the same."""
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class VisionTower(OwnModel):
    """Pixels to rows of patches."""

    config_class = Step3VisionConfig
    main_input_name = "pixels"

    def __init__(self, config: Step3VisionConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.transformer = Encoder(config)
        self.post_init()

    def forward(self, pixels: Tensor) -> Tensor:
        """`(tiles, channels, side, side)` to `(tiles, patches, width)`, without the class rows."""
        return self.transformer(self.embeddings(pixels))[:, CLASS_ROWS:]  # type: ignore[no-any-return]


class Step3Model(OwnModel):
    """The vision encoder of Step3; the language model is not here."""

    config_class = Step3Config
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    _no_split_modules: ClassVar = ["Layer"]
    _keys_to_ignore_on_load_unexpected: ClassVar = [
        r"^vision_model\.embeddings\.position_ids$",
        r"^(model\.)?(language_model|embed_tokens|layers|norm)\.",
        r"^lm_head\.",
    ]

    def __init__(self, config: Step3Config) -> None:
        super().__init__(config)
        vision = config.vision_config
        width = vision.output_hidden_size
        self.vision_model = VisionTower(vision)
        self.vit_downsampler = nn.Conv2d(vision.hidden_size, width, 2, stride=config.understand_projector_stride)
        self.vit_downsampler2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.vit_large_projector = nn.Linear(2 * width, config.text_config.hidden_size, bias=config.projector_bias)
        self.post_init()

    def get_image_features(
        self,
        pixel_values: Tensor,
        pixel_values_local: Tensor | None = None,
        num_local_patches: Sequence[int] | Tensor | None = None,
    ) -> BaseModelOutputWithPooling:
        """Features of images, one at a time.

        Args:
            pixel_values: `(images, channels, side, side)`, the global views.
            pixel_values_local: `(tiles, channels, side', side')`, the local tiles of all images.
            num_local_patches: how many of them each image has.

        Returns:
            `pooler_output` is a list, one `(rows, hidden)` an image: its local tiles, then its global view.
        """
        found, start = [], 0
        for index, pixels in enumerate(pixel_values):
            tiles = 0 if num_local_patches is None else int(num_local_patches[index])
            views = [self._features(pixels[None])]
            if tiles:
                assert pixel_values_local is not None
                views.insert(0, self._features(pixel_values_local[start : start + tiles]))
            start += tiles
            found.append(torch.cat(views))
        return BaseModelOutputWithPooling(pooler_output=found)

    def _features(self, tiles: Tensor) -> Tensor:
        rows = self.vision_model(tiles)
        side = round(rows.shape[1] ** 0.5)
        square = rows.transpose(1, 2).reshape(len(tiles), -1, side, side)
        thinned = self.vit_downsampler2(self.vit_downsampler(square))
        return self.vit_large_projector(thinned.flatten(2).transpose(1, 2)).flatten(0, 1)  # type: ignore[no-any-return]


AutoConfig.register(Step3Config.model_type, Step3Config)
AutoModel.register(Step3Config, Step3Model)
