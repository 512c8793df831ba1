"""DeepSeek-VL2: SigLIP so400m/14 on tiles of 384 pixels, 2x2 patches a token, learned newlines and a separator.

Checkpoints: `deepseek-ai/deepseek-vl2{-tiny,-small,}`. Reference: `modeling_deepseek_vl_v2.py` and `siglip_vit.py` in
deepseek-ai/DeepSeek-VL2. Names and defaults of configurations are the publisher's, since published files leave defaults
out. Weights have the names and shapes of the published checkpoints (`vision.blocks.0.attn.qkv`, `view_seperator`), so
nothing is renamed; the pooling head that the checkpoints hold (`vision.attn_pool`) has no part in the result.

Several models are published with `"model_type": "deepseek_vl_v2"`, told apart by `architectures`: `BY_ARCHITECTURE`
has the configuration classes of the others, and `DeepseekVLV2Config(...)` is then one of those, with a model type of
its own.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from onereplay.errors import UnsupportedModelError
from onereplay.models.base import ComposedConfig, LanguageConfig, OwnModel

BY_ARCHITECTURE: dict[str, type["DeepseekVLV2Config"]] = {}
"""Models of other architectures under this model type; files of this package add theirs."""


class VisionEncoderConfig(PreTrainedConfig):  # type: ignore[misc]
    """The tower; the published names, and those that transformers uses."""

    model_type = "vision"
    attribute_map: ClassVar = {
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
    }

    model_name: str = "siglip_large_patch16_384"
    image_size: int = 384
    patch_size: int = 16
    width: int = 1024
    layers: int = 24
    heads: int = 16
    mlp_ratio: float = 4.0

    @property
    def intermediate_size(self) -> int:
        """4,304 in the published checkpoints."""
        return int(self.width * self.mlp_ratio)

    @property
    def side(self) -> int:
        """Patches along a side of a tile; pixels that fill no patch are not read."""
        return self.image_size // self.patch_size


class MlpProjectorConfig(PreTrainedConfig):  # type: ignore[misc]
    """The projector."""

    model_type = "mlp_projector"

    projector_type: str = "downsample_mlp_gelu"
    input_dim: int = 1152
    n_embed: int = 2048
    depth: int = 2
    mlp_ratio: int = 1
    downsample_ratio: int = 2
    token_pooling: bool = False


class DeepseekVLV2Config(ComposedConfig):
    """The whole model; of another architecture, an object of that one's class."""

    model_type = "deepseek_vl_v2"
    sub_configs: ClassVar = {
        "vision_config": VisionEncoderConfig,
        "projector_config": MlpProjectorConfig,
        "language_config": LanguageConfig,
    }

    vision_config: Any = None
    projector_config: Any = None
    language_config: Any = None
    tile_tag: str = "2D"
    global_view_pos: str = "head"
    candidate_resolutions: Any = field(default_factory=lambda: [[384, 384]])

    def __new__(cls, *args: Any, architectures: Sequence[str] | None = None, **kwargs: Any) -> "DeepseekVLV2Config":
        """Python goes on with the `__init__` of what is returned.

        Raises:
            ValueError: another DeepSeek-OCR than there is here.
        """
        chosen = cls
        for name in architectures or () if cls is DeepseekVLV2Config else ():
            chosen = BY_ARCHITECTURE.get(name, cls)
            if chosen is cls and name.startswith("DeepseekOCR"):
                raise ValueError(
                    f"architecture {name} of model type deepseek_vl_v2; there is {', '.join(BY_ARCHITECTURE)}, and "
                    f"transformers' own deepseek_ocr2"
                )
        found: DeepseekVLV2Config = super().__new__(chosen)
        return found

    @property
    def text_config(self) -> PreTrainedConfig:
        """The name that transformers uses."""
        found: PreTrainedConfig = self.language_config
        return found


class Attention(nn.Module):
    """Full attention inside a tile."""

    is_causal = False

    def __init__(self, config: VisionEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.heads
        self.head_size = config.width // config.heads
        self.scaling = self.head_size**-0.5
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(tiles, patches, width)` to the same."""
        shape = (*hidden.shape[:2], 3, -1, self.head_size)
        query, key, value = self.qkv(hidden).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mixed = attend(self, query, key, value, None, scaling=self.scaling, is_causal=False)[0]
        return self.proj(mixed.flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Two layers; the activation of SigLIP is the approximation by tanh."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(..., width)` to the same."""
        return self.fc2(self.act(self.fc1(hidden)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, config: VisionEncoderConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=1e-6)
        self.mlp = Mlp(config.width, config.intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(tiles, patches, width)` to the same."""
        hidden = hidden + self.attn(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))  # type: ignore[no-any-return]


class PatchEmbed(nn.Module):
    """Pixels to patches."""

    def __init__(self, config: VisionEncoderConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """`(tiles, 3, image_size, image_size)` to `(tiles, patches, width)`."""
        return self.proj(pixels).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class VisionTower(OwnModel):
    """SigLIP without its head."""

    config_class = VisionEncoderConfig
    main_input_name = "pixels"

    def __init__(self, config: VisionEncoderConfig) -> None:
        super().__init__(config)
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Parameter(torch.empty(1, config.side**2, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.post_init()

    def forward(self, pixels: Tensor) -> Tensor:
        """`(tiles, 3, image_size, image_size)` to `(tiles, side * side, width)`."""
        hidden = self.patch_embed(pixels) + self.pos_embed
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)  # type: ignore[no-any-return]


class MlpProjector(nn.Module):
    """Squares of patches to tokens; a side that the ratio does not divide is filled up with zeros, below and right.

    Raises:
        UnsupportedModelError: a projector that no published checkpoint of DeepSeek-VL2 has.
    """

    def __init__(self, config: MlpProjectorConfig) -> None:
        super().__init__()
        if (config.projector_type, config.depth, config.token_pooling) != ("downsample_mlp_gelu", 2, False):
            raise UnsupportedModelError(
                f"a projector of projector_type={config.projector_type!r}, depth={config.depth}, token_pooling="
                f"{config.token_pooling} is not supported; use 'downsample_mlp_gelu', 2 and False, as published"
            )
        self.ratio = config.downsample_ratio
        inner = config.n_embed * config.mlp_ratio
        self.layers = nn.Sequential(
            nn.Linear(config.input_dim * self.ratio**2, inner), nn.GELU(), nn.Linear(inner, config.n_embed)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """`(tiles, side * side, width)` to `(tiles, ceil(side / ratio)**2, n_embed)`.

        A token's values are ordered by channel, then row and column inside the square, as `unfold` gives them.
        """
        tiles, patches, width = hidden.shape
        side = round(patches**0.5)
        across = -(-side // self.ratio)
        rest = across * self.ratio - side
        square = pad(hidden.view(tiles, side, side, width), (0, 0, 0, rest, 0, rest))
        units = square.view(tiles, across, self.ratio, across, self.ratio, width).permute(0, 1, 3, 5, 2, 4)
        return self.layers(units.reshape(tiles, across**2, -1))  # type: ignore[no-any-return]


class DeepseekVLV2Model(OwnModel):
    """The vision encoder of DeepSeek-VL2; the language model is not here."""

    config_class = DeepseekVLV2Config
    main_input_name = "pixel_values"
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"^vision\.attn_pool\.", r"^language\."]

    def __init__(self, config: DeepseekVLV2Config) -> None:
        super().__init__(config)
        self.vision = VisionTower(config.vision_config)
        self.projector = MlpProjector(config.projector_config)
        self.image_newline = nn.Parameter(torch.empty(config.projector_config.n_embed))
        self.view_seperator = nn.Parameter(torch.empty(config.projector_config.n_embed))
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, images_spatial_crop: Tensor) -> BaseModelOutputWithPooling:
        """Features of images, one at a time.

        Args:
            pixel_values: `(tiles, 3, image_size, image_size)`; of each image the whole, then its tiles row by row.
            images_spatial_crop: int `(images, 2)`, columns and rows of tiles.

        Returns:
            `pooler_output` is a tuple, one `(rows, n_embed)` an image.
        """
        found, start, pixel_values = [], 0, pixel_values.to(self.dtype)
        for across, down in images_spatial_crop.tolist():
            tokens = self.projector(self.vision(pixel_values[start : start + 1 + across * down]))
            start += 1 + across * down
            found.append(self._arranged(tokens, across, down))
        return BaseModelOutputWithPooling(pooler_output=tuple(found))

    def _arranged(self, tokens: Tensor, across: int, down: int) -> Tensor:
        side = round(tokens.shape[1] ** 0.5)
        whole = tokens[0].view(side, side, -1)
        tiles = tokens[1:].view(down, across, side, side, -1).transpose(1, 2).reshape(down * side, across * side, -1)
        newline = self.image_newline
        parts = [torch.cat([rows, newline.expand(len(rows), 1, -1)], dim=1).flatten(0, 1) for rows in (whole, tiles)]
        first, last = parts if self.config.global_view_pos == "head" else parts[::-1]
        return torch.cat([first, self.view_seperator[None], last])


AutoConfig.register(DeepseekVLV2Config.model_type, DeepseekVLV2Config)
AutoModel.register(DeepseekVLV2Config, DeepseekVLV2Model)
