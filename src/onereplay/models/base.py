"""What the files of this package share: configurations inside a configuration, initial
values, and parts of CLIP."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class LanguageConfig(PreTrainedConfig):  # type: ignore[misc]
    """A language model's width. Nothing else of a published language model is kept, since none is ever built here."""

    hidden_size: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        """The rest (experts, rotary scaling) is written for classes that transformers may not have."""
        super().__post_init__()


class ComposedConfig(PreTrainedConfig):  # type: ignore[misc]
    """A configuration whose fields named in `sub_configs` are configurations too, given as such or as mappings."""

    sub_configs: ClassVar[dict[str, type[PreTrainedConfig]]] = {}

    def __post_init__(self, **kwargs: Any) -> None:
        for name, config_class in self.sub_configs.items():
            value = getattr(self, name)
            if not isinstance(value, PreTrainedConfig):
                setattr(self, name, config_class(**(value or {})))
        super().__post_init__(**kwargs)


def init_bare_parameters_(model: PreTrainedModel, module: nn.Module) -> None:
    """Draw parameters other than weights and biases, which transformers leaves as they are; for `_init_weights`."""
    for name, parameter in module.named_parameters(recurse=False):
        if name not in ("weight", "bias"):
            init.normal_(parameter, std=getattr(model.config, "initializer_range", 0.02))


class OwnModel(PreTrainedModel):  # type: ignore[misc]
    """What transformers asks of a model: attention through its registry, and initial values."""

    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """transformers draws weights and biases; position tables and delimiters are drawn here."""
        super()._init_weights(module)
        init_bare_parameters_(self, module)


class Attention(nn.Module):
    """Full attention inside a tile."""

    is_causal = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_size**-0.5
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`(tiles, rows, width)` to the same."""
        shape = (*hidden.shape[:2], 3, -1, self.head_size)
        query, key, value = self.qkv_proj(hidden).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mixed = attend(self, query, key, value, attention_mask, scaling=self.scaling, is_causal=False)[0]
        return self.out_proj(mixed.flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation_fn = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`(..., width)` to the same."""
        return self.fc2(self.activation_fn(self.fc1(hidden)))  # type: ignore[no-any-return]


def resized_positions(table: Tensor, side: int) -> Tensor:
    """A learned table for a class row and a square of patches, for another square: `(1 + side * side, width)`."""
    own = round((len(table) - 1) ** 0.5)
    if own == side:
        return table
    square = table[1:].float().view(1, own, own, -1).permute(0, 3, 1, 2)
    resized = interpolate(square, size=(side, side), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([table[:1], resized.to(table.dtype).flatten(2)[0].T])
