"""The models that onereplay runs, by the `model_type` of their transformers configuration. One line a model."""

import importlib
from typing import Any

from onereplay.adapters.base import Adapter
from onereplay.config import EncoderCudaGraphConfig
from onereplay.errors import UnsupportedModelError
from onereplay.optimize import choose

ADAPTERS: dict[str, str] = {
    "internvl": "onereplay.adapters.internvl:InternVL",
    "lfm2_vl": "onereplay.adapters.lfm2_vl:Lfm2VL",
    "qwen2_5_vl": "onereplay.adapters.qwen2_5_vl:Qwen25VL",
}


def adapter_class(model_type: str) -> type[Adapter[Any]]:
    """The adapter of a model type.

    Raises:
        UnsupportedModelError: there is none; the message lists those that exist.
    """
    if model_type not in ADAPTERS:
        raise UnsupportedModelError(
            f"no adapter for model type {model_type!r}; there are adapters for {', '.join(sorted(ADAPTERS))} "
            f"(docs/adding_a_model.md tells how to write one)"
        )
    module, _, name = ADAPTERS[model_type].partition(":")
    found: type[Adapter[Any]] = getattr(importlib.import_module(module), name)
    return found


def adapter_for(model: Any, config: EncoderCudaGraphConfig | None = None) -> Adapter[Any]:
    """An adapter on a loaded transformers model, the base model or one with a head.

    Args:
        model: the model.
        config: its `attention` and `optimize` are the adapter's; without one, `auto` attention and no rewrites.

    Raises:
        UnsupportedModelError: the model type has no adapter, or the model has no vision modules.
        ConfigError: a rewrite that the back end cannot hold.
    """
    found = adapter_class(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    for candidate in (model, getattr(model, "model", None)):
        if candidate is not None and all(getattr(candidate, part, None) is not None for part in found.parts):
            adapter = found(candidate.config, candidate)
            if config is None:
                return adapter
            names = choose(config.optimize, adapter.device, config.backend)
            return found(candidate.config, candidate, config.attention, names)
    raise UnsupportedModelError(
        f"{type(model).__name__} has no {' and '.join(found.parts)}; give the whole model or its base model"
    )
