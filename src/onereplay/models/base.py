"""What the files of this package share: configurations inside a configuration, and initial values."""

from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init


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
