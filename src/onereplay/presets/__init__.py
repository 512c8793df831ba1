"""Published vision configurations as data, each with its source.

A preset is what a benchmark or a test needs when no checkpoint is at hand: the configuration of the vision tower and
its projector as published, the image processor's settings, and a stand-in for the language model. `NAME@tiny` is the
same structure in a size for a CPU.

Every size is written out. The defaults of the transformers configuration classes are not the checkpoints'
(`Qwen2_5_VLVisionConfig()` has a hidden size of 3,584; the published tower has 1,280).

The language model is a stand-in in everything but its hidden size, which sizes the projector: one to three layers, 64
token ids, and special tokens among those. It never gets weights; the tiny ones are complete enough to `generate`.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from onereplay.errors import ConfigError, UnsupportedModelError
from onereplay.presets.base import Build, Preset

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["PREFIX", "Preset", "get_preset", "hf_config", "preset_names"]

PREFIX = "preset:"
"""Marks a preset where a model is asked for: `preset:NAME`."""

FAMILIES = (
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "internvl",
    "gemma3",
    "deepseek_vl",
    "llama4",
    "idefics3",
    "lfm2_vl",
    "gemma4",
    "pixtral",
    "mistral3",
    "minicpmv4_6",
    "glm4v",
    "minimax_m3_vl",
    "ernie4_5_vl",
    "paddleocr_vl",
    "kimi_k25",
    "lfm3_vl",
    "deepseek_ocr",
    "deepseek_vl2",
    "deepseek_v41",
    "step3",
    "siglip",
    "clip",
    "dino",
    "whisper",
    "qwen2_audio",
    "qwen2_5_omni",
)
"""Files of this package, in the order of `onereplay models`. Each has `PRESETS`: names and how each is built."""


@functools.cache
def _presets() -> Mapping[str, Build]:
    found: dict[str, Build] = {}
    for family in FAMILIES:
        found |= importlib.import_module(f"{__name__}.{family}").PRESETS
    return found


def preset_names() -> tuple[str, ...]:
    """Every name that `get_preset` knows, without the `@tiny` forms."""
    return tuple(_presets())


def get_preset(spec: str) -> Preset:
    """The preset called `NAME`, or its small form `NAME@tiny`; a new object on every call.

    Raises:
        ConfigError: the name or the form is unknown; the message lists the names.
    """
    name, at, form = spec.partition("@")
    if name not in _presets() or (at and form != "tiny"):
        raise ConfigError(
            f"no preset {spec!r}; there are {', '.join(_presets())}, "
            "each also as NAME@tiny (the same structure in a size for a CPU)"
        )
    return _presets()[name](name, tiny=bool(at))


def hf_config(preset: Preset) -> PreTrainedConfig:
    """The transformers configuration object of a preset; new on every call.

    Raises:
        UnsupportedModelError: the installed transformers is older than the model.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from onereplay import models

    models.register()
    fields = copy.deepcopy(dict(preset.config))
    model_type = fields.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no model type {model_type!r}; install a newer one"
        )
    return transformers.AutoConfig.for_model(model_type, **fields)
