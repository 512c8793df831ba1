"""The vision encoder of DeepSeek-V4.1: a ViT with rotary positions for grids of any size, 3x3 patches a token, and
learned rows that begin and end an image and each of its rows.

Checkpoint: `deepseek-ai/DeepSeek-V4.1-Flash`. Reference: its `config.json`, `inference/vision.py` and
`inference/image_processor.py` (revision dba1be0a40aa), as quoted publicly. transformers has the language model of
DeepSeek-V4 and no vision. Weights have the names and shapes of the checkpoint (`vision.blocks.0.attn.wqkv`,
`aligner.w1`, `image_start`), so nothing is renamed.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, silu
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from onereplay.models.base import ComposedConfig, LanguageConfig, OwnModel

DELIMITERS = ("image_start", "image_newline", "image_end")
"""Learned rows, in this order wherever they lie one behind the other."""


class DeepseekV41VisionConfig(PreTrainedConfig):  # type: ignore[misc]
    """The tower, and how its images are cut; the published names."""

    model_type = "deepseek_v41_vision"

    num_hidden_layers: int = 0
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: Any = None


class DeepseekV41Config(ComposedConfig):
    """The whole model."""

    model_type = "deepseek_v41"
    sub_configs: ClassVar = {"vision_config": DeepseekV41VisionConfig, "text_config": LanguageConfig}

    vision_config: Any = None
    text_config: Any = None
    image_token_id: int = 129264

    def __post_init__(self, **kwargs: Any) -> None:
        """The published quantisation is the language model's; the vision weights are bfloat16."""
        kwargs.pop("quantization_config", None)
        super().__post_init__(**kwargs)


class RMSNorm(nn.Module):
    """In float32, whatever the weights are; 1e-6 is not the language model's epsilon."""

    variance_epsilon = 1e-6

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """`(..., width)` to the same."""
        exact = hidden.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * exact).to(hidden.dtype)


class Attention(nn.Module):
    """Full attention inside an image."""

    is_causal = False

    def __init__(self, config: DeepseekV41VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_size**-0.5
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Tensor, cu_seqlens: Tensor | None, position_embeddings: tuple[Tensor, Tensor], max_seqlen: int
    ) -> Tensor:
        """`(patches, width)` to the same; of `position_embeddings` see `VisionTower.angles`.

        Without `cu_seqlens` all patches are of one image; see `VisionTower.forward`.
        """
        query, key, value = self.wqkv(hidden).view(len(hidden), 3, -1, self.head_size).unbind(1)
        query, key = (_rotated(rows, *position_embeddings) for rows in (query, key))
        query, key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        packed = {} if cu_seqlens is None else {"cu_seq_lens_q": cu_seqlens, "max_length_q": max_seqlen}
        mixed = attend(self, query, key, value, None, scaling=self.scaling, is_causal=False, **packed)[0]
        return self.wo(mixed.view(len(hidden), -1))  # type: ignore[no-any-return]


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first and second half of each head are the two coordinates that turn."""
    first, second = rows.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (rows * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(rows.dtype)


class Mlp(nn.Module):
    """SwiGLU; gate and value are one matrix."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, 2 * inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(..., width)` to the same."""
        gate, value = self.w1(hidden).chunk(2, dim=-1)
        return self.w2(silu(gate) * value)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, config: DeepseekV41VisionConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.hidden_size)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def forward(
        self, hidden: Tensor, cu_seqlens: Tensor | None, position_embeddings: tuple[Tensor, Tensor], max_seqlen: int
    ) -> Tensor:
        """As `Attention.forward`."""
        hidden = hidden + self.attn(self.norm1(hidden), cu_seqlens, position_embeddings, max_seqlen)
        return hidden + self.mlp(self.norm2(hidden))  # type: ignore[no-any-return]


class PatchEmbed(nn.Module):
    """Pixels to patches."""

    def __init__(self, config: DeepseekV41VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * config.patch_size**2, config.hidden_size)

    def forward(self, patches: Tensor) -> Tensor:
        """`(patches, 3, patch_size, patch_size)` to `(patches, width)`."""
        return self.proj(patches.flatten(1))  # type: ignore[no-any-return]


class VisionTower(OwnModel):
    """The ViT."""

    config_class = DeepseekV41VisionConfig
    main_input_name = "patches"

    def __init__(self, config: DeepseekV41VisionConfig) -> None:
        super().__init__(config)
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.post_init()

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each patch's turns, float32 `(patches, head_size)`: for both halves of a head alike.

        Args:
            positions: row and column of each patch, integers `(patches, 2)`.
        """
        turned = self.config.hidden_size // self.config.num_attention_heads // 2
        steps = torch.arange(0, turned, 2, dtype=torch.float32, device=positions.device)
        turns = (positions.float().unsqueeze(-1) / self.config.rope_theta ** (steps / turned)).flatten(1).repeat(1, 2)
        return turns.cos(), turns.sin()

    def forward(self, patches: Tensor, positions: Tensor, offsets: Tensor | None = None, longest: int = 0) -> Tensor:
        """`(patches, 3, patch_size, patch_size)` to `(patches, width)`.

        Args:
            patches: of one image; of several with `offsets`, for an attention that takes them.
            positions: row and column of each patch.
            offsets: cumulative lengths of the images, int32.
            longest: at least the patches of the largest image.
        """
        hidden = self.patch_embed(patches)
        angles = self.angles(positions)
        for block in self.blocks:
            hidden = block(hidden, cu_seqlens=offsets, position_embeddings=angles, max_seqlen=longest)
        return self.norm(hidden)  # type: ignore[no-any-return]


class Aligner(nn.Module):
    """Squares of patches to tokens of the language model."""

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        vision, hidden = config.vision_config, config.text_config.hidden_size
        self.w1 = nn.Linear(vision.hidden_size * vision.downsample_ratio**2, hidden)
        self.w2 = nn.Linear(hidden, hidden)

    def forward(self, units: Tensor) -> Tensor:
        """`(tokens, ratio**2, width)`, the patches of each square row by row, to `(tokens, hidden)`.

        The weights expect a square's values by channel, then patch.
        """
        return self.w2(gelu(self.w1(units.transpose(1, 2).flatten(1))))  # type: ignore[no-any-return]


class DeepseekV41Model(OwnModel):
    """The vision encoder of DeepSeek-V4.1; the language model is not here."""

    config_class = DeepseekV41Config
    main_input_name = "patches"
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"^(layers|mtp)\.", r"^(embed|head|norm)\.", r"^hc_head"]

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__(config)
        self.vision = VisionTower(config.vision_config)
        self.aligner = Aligner(config)
        for name in DELIMITERS:
            self.register_parameter(name, nn.Parameter(torch.empty(config.text_config.hidden_size)))
        self.post_init()

    def get_image_features(self, patches: Tensor, vit_grid: Tensor) -> BaseModelOutputWithPooling:
        """Features of images, one at a time.

        Args:
            patches: `(patches, 3, patch_size, patch_size)` of all images, row by row.
            vit_grid: int `(images, 2)`, rows and columns of patches.

        Returns:
            `pooler_output` is a tuple, one `(rows, hidden)` an image: start, each row of tokens and a newline, end.
        """
        found, start, patches = [], 0, patches.to(self.dtype)
        for height, width in vit_grid.tolist():
            image = patches[start : start + height * width]
            start += height * width
            positions = torch.cartesian_prod(*(torch.arange(side, device=patches.device) for side in (height, width)))
            found.append(self._span(self.vision(image, positions.view(-1, 2)), height, width))
        return BaseModelOutputWithPooling(pooler_output=tuple(found))

    def _span(self, hidden: Tensor, height: int, width: int) -> Tensor:
        ratio = self.config.vision_config.downsample_ratio
        down, across = -(-height // ratio), -(-width // ratio)
        square = pad(hidden.view(height, width, -1), (0, 0, 0, across * ratio - width, 0, down * ratio - height))
        units = square.view(down, ratio, across, ratio, -1).transpose(1, 2).reshape(down * across, ratio**2, -1)
        tokens = self.aligner(units).view(down, across, -1)
        lines = torch.cat([tokens, self.image_newline.expand(down, 1, -1)], dim=1).flatten(0, 1)
        return torch.cat([self.image_start[None], lines, self.image_end[None]])


AutoConfig.register(DeepseekV41Config.model_type, DeepseekV41Config)
AutoModel.register(DeepseekV41Config, DeepseekV41Model)
