"""DeepSeek-OCR: SAM-B over tiles, CLIP-L over SAM's features, a linear projector, learned newlines and a separator.

Checkpoint: `deepseek-ai/DeepSeek-OCR`, published with `"model_type": "deepseek_vl_v2"` and
`"architectures": ["DeepseekOCRForCausalLM"]`. Reference: its `deepencoder.py` and `modeling_deepseekocr.py`; the vision
stack of `modeling_unlimited_ocr.py` in transformers 5.24 is the same. SAM is that of DeepSeek-OCR-2 in transformers
(5.17 and 5.24), with wider last features; CLIP is here, since the published one takes features in place of pixels and
has qkv in one matrix. Its patch embedding is published too, and used by nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2SamVisionConfig
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2SamVisionEncoder

from onereplay.errors import UnsupportedModelError
from onereplay.models.base import Attention, LanguageConfig, Mlp, OwnModel, resized_positions
from onereplay.models.deepseek_vl_v2 import BY_ARCHITECTURE, DeepseekVLV2Config, MlpProjectorConfig

CLIP, SAM = "clip-l-14-224", "sam_vit_b"

RENAMED = {
    r"(^|model\.)sam_model\.": r"\1vision_tower.sam_encoder.",
    r"sam_encoder\.blocks\.(\d+)\.norm1\.": r"sam_encoder.layers.\1.layer_norm1.",
    r"sam_encoder\.blocks\.(\d+)\.norm2\.": r"sam_encoder.layers.\1.layer_norm2.",
    r"sam_encoder\.blocks\.": "sam_encoder.layers.",
    r"sam_encoder\.patch_embed\.proj\.": "sam_encoder.patch_embed.projection.",
    r"sam_encoder\.neck\.0\.": "sam_encoder.neck.conv1.",
    r"sam_encoder\.neck\.1\.": "sam_encoder.neck.layer_norm1.",
    r"sam_encoder\.neck\.2\.": "sam_encoder.neck.conv2.",
    r"sam_encoder\.neck\.3\.": "sam_encoder.neck.layer_norm2.",
    r"sam_encoder\.net_2\.": "sam_encoder.proj.conv1.",
    r"sam_encoder\.net_3\.": "sam_encoder.proj.conv2.",
    r"(^|model\.)vision_model\.": r"\1vision_tower.vision_encoder.",
    r"vision_encoder\.transformer\.": "vision_encoder.encoder.",
    r"(^|model\.)projector\.layers\.": r"\1multi_modal_projector.",
    r"(^|model\.)view_seperator": r"\1view_separator",
}
"""Published names to ours, each applied in turn. Source: the modules of `deepencoder.py` and of `DeepseekOCRModel`."""


class DeepseekOcrVisionConfig(PreTrainedConfig):  # type: ignore[misc]
    """Both towers under the published names: sizes of each by its name in `width`.

    What `deepencoder.py` writes into its code is not in the published file; here it may be among a tower's sizes.
    """

    model_type = "vision"

    model_name: str = "deeplip_b_l"
    image_size: int = 1024
    mlp_ratio: float = 3.7362
    width: Any = None

    @property
    def sam_config(self) -> DeepseekOcr2SamVisionConfig:
        """SAM-B; what the published file leaves out is the same in every SAM-B."""
        sizes = _sizes(self.width, SAM)
        return DeepseekOcr2SamVisionConfig(
            hidden_size=sizes["width"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            global_attn_indexes=list(sizes["global_attn_indexes"]),
            downsample_channels=list(sizes["downsample_channels"]),
            image_size=self.image_size,
            patch_size=sizes.get("patch_size", 16),
            window_size=sizes.get("window_size", 14),
            output_channels=sizes.get("out_channels", 256),
            mlp_dim=4 * sizes["width"],
            num_channels=3,
            hidden_act="gelu",
            layer_norm_eps=1e-6,
            qkv_bias=True,
            use_abs_pos=True,
            use_rel_pos=True,
            attn_implementation="sdpa",
        )

    @property
    def encoder_config(self) -> "ClipConfig":
        """CLIP-L."""
        sizes = _sizes(self.width, CLIP)
        return ClipConfig(
            hidden_size=sizes["width"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            image_size=sizes["image_size"],
            patch_size=sizes["patch_size"],
            intermediate_size=sizes.get("ffn_hidden_size", 4 * sizes["width"]),
            attn_implementation="sdpa",
        )


def _sizes(width: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(width, Mapping) or name not in width:
        raise UnsupportedModelError(f"vision_config.width has no {name!r}; a published DeepSeek-OCR has it")
    found: Mapping[str, Any] = width[name]
    return found


class ClipConfig(PreTrainedConfig):  # type: ignore[misc]
    """CLIP over features of the same width."""

    model_type = "deepseek_ocr_clip"

    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    image_size: int = 224
    patch_size: int = 14
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5

    @property
    def side(self) -> int:
        """Positions along a side of the learned table."""
        return self.image_size // self.patch_size


class DeepseekOcrConfig(DeepseekVLV2Config):
    """The whole model."""

    model_type = "deepseek_ocr"
    sub_configs: ClassVar = {
        "vision_config": DeepseekOcrVisionConfig,
        "projector_config": MlpProjectorConfig,
        "language_config": LanguageConfig,
    }

    def __post_init__(self, **kwargs: Any) -> None:
        """A published file has the model type of DeepSeek-VL2."""
        super().__post_init__(**{name: value for name, value in kwargs.items() if name != "model_type"})


class Layer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`(tiles, rows, width)` to the same."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), attention_mask)
        return hidden + self.mlp(self.layer_norm2(hidden))  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    """A class row in front of the features, and positions; their table is resized to a tile of another size."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(config.hidden_size))
        self.position_embedding = nn.Embedding(1 + config.side**2, config.hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        """`(tiles, width, side, side)` to `(tiles, 1 + side * side, width)`."""
        tiles, _, side, _ = features.shape
        rows = torch.cat([self.class_embedding.expand(tiles, 1, -1), features.flatten(2).transpose(1, 2)], dim=1)
        return rows + resized_positions(self.position_embedding.weight, side)


class Encoder(OwnModel):
    """CLIP without its patch embedding and its last norm."""

    config_class = ClipConfig
    main_input_name = "features"

    def __init__(self, config: ClipConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, features: Tensor) -> Tensor:
        """`(tiles, width, side, side)` to `(tiles, 1 + side * side, width)`."""
        hidden = self.pre_layrnorm(self.embeddings(features))
        for layer in self.encoder.layers:  # type: ignore[union-attr]
            hidden = layer(hidden)
        return hidden  # type: ignore[no-any-return]


class VisionTower(OwnModel):
    """SAM, then CLIP over SAM's features."""

    config_class = DeepseekOcrVisionConfig
    main_input_name = "pixels"

    def __init__(self, config: DeepseekOcrVisionConfig) -> None:
        super().__init__(config)
        self.sam_encoder = DeepseekOcr2SamVisionEncoder(config.sam_config)
        self.vision_encoder = Encoder(config.encoder_config)
        self.post_init()

    def forward(self, pixels: Tensor) -> Tensor:
        """`(tiles, 3, side, side)` to `(tiles, (side / 64)**2, CLIP's width + SAM's)`."""
        features = self.sam_encoder(pixels).last_hidden_state
        return torch.cat([self.vision_encoder(features)[:, 1:], features.flatten(2).transpose(1, 2)], dim=-1)


class DeepseekOcrModel(OwnModel):
    """The vision encoder of DeepSeek-OCR; the language model is not here."""

    config_class = DeepseekOcrConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    _no_split_modules: ClassVar = ["Layer", "DeepseekOcr2SamVisionLayer"]
    _keys_to_ignore_on_load_unexpected: ClassVar = [
        r"^vision_tower\.vision_encoder\.embeddings\.(patch_embedding|position_ids)",
        r"^(model\.)?(embed_tokens|layers|norm)\.",
        r"^lm_head\.",
    ]

    def __init__(self, config: DeepseekOcrConfig) -> None:
        super().__init__(config)
        projector = config.projector_config
        if projector.projector_type != "linear":
            raise UnsupportedModelError(
                f"a projector of projector_type={projector.projector_type!r} is not supported; use 'linear'"
            )
        self.vision_tower = VisionTower(config.vision_config)
        self.multi_modal_projector = nn.Linear(projector.input_dim, projector.n_embed)
        self.image_newline = nn.Parameter(torch.empty(projector.n_embed))
        self.view_separator = nn.Parameter(torch.empty(projector.n_embed))
        self.post_init()

    def get_image_features(
        self,
        pixel_values: Tensor,
        pixel_values_local: Tensor | None = None,
        num_local_patches: Sequence[int] | Tensor | None = None,
        patches_grid: Sequence[Sequence[int]] | Tensor | None = None,
    ) -> BaseModelOutputWithPooling:
        """Features of images, one at a time.

        Args:
            pixel_values: `(images, 3, side, side)`, the global views.
            pixel_values_local: `(tiles, 3, side', side')`, the local tiles of all images, row by row of each.
            num_local_patches: how many of them each image has.
            patches_grid: columns and rows of each image's tiles.

        Returns:
            `pooler_output` is a list, one `(rows, hidden)` an image: the tiles as one picture, the global view, each
            with a newline behind every row, then the separator.
        """
        found, start = [], 0
        for index, pixels in enumerate(pixel_values):
            views = [self._features(pixels[None], 1, 1)]
            tiles = 0 if num_local_patches is None else int(num_local_patches[index])
            if tiles:
                assert pixel_values_local is not None
                assert patches_grid is not None
                columns, rows = (int(count) for count in patches_grid[index])
                views.insert(0, self._features(pixel_values_local[start : start + tiles], rows, columns))
            start += tiles
            found.append(torch.cat([*views, self.view_separator[None]]))
        return BaseModelOutputWithPooling(pooler_output=found)

    def _features(self, tiles: Tensor, rows: int, columns: int) -> Tensor:
        tokens = self.multi_modal_projector(self.vision_tower(tiles))
        side = round(tokens.shape[1] ** 0.5)
        picture = tokens.view(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        newlines = self.image_newline.expand(len(picture), 1, -1)
        return torch.cat([picture, newlines], dim=1).flatten(0, 1)


BY_ARCHITECTURE["DeepseekOCRForCausalLM"] = DeepseekOcrConfig
AutoConfig.register(DeepseekOcrConfig.model_type, DeepseekOcrConfig)
AutoModel.register(DeepseekOcrConfig, DeepseekOcrModel)
register_checkpoint_conversion_mapping(
    DeepseekOcrConfig.model_type, [WeightRenaming(old, new) for old, new in RENAMED.items()]
)
