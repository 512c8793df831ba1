"""What the files of presets share: the record, and stand-ins for language models."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]

VOCABULARY = 64
BOS, EOS, PAD = 1, 2, 0
AUDIO, VISION_START, VISION_END, IMAGE, VIDEO = 59, 60, 61, 62, 63


Build = Callable[..., "Preset"]
"""`build(name, *, tiny)` makes one preset, or its small form."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One published vision configuration.

    Attributes:
        name: what `get_preset` was asked for, `@tiny` included.
        model_type: of transformers, such as `qwen2_5_vl`.
        architecture: the transformers class of the whole model.
        config: the content of a `config.json`; the language model in it is a stand-in (see the module docstring).
        processor: the content of a `preprocessor_config.json`.
        checkpoint: hub id of the published weights that the configuration describes.
        source: where the values were read.
        assumed: dotted names of values that were not read in a file that the model's publisher released;
            `processor.` stands for the image processor's settings.
    """

    name: str
    model_type: str
    architecture: str
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    checkpoint: str
    source: str
    assumed: tuple[str, ...] = ()


def stand_in(model_type: str, hidden: int, *, heads: int, layers: int) -> dict[str, Any]:
    """A language model of the real hidden size with nothing else in it."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def whole(
    model_type: str, architecture: str, vision: dict[str, Any], text: dict[str, Any], tiny: bool
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "float32" if tiny else "bfloat16",
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
        "text_config": {**text, "tie_word_embeddings": False},
        "vision_config": vision,
    }


def tower_alone(build: Build, architecture: str) -> Build:
    """The vision tower of a model of two towers as a model of its own."""

    def alone(name: str, *, tiny: bool) -> Preset:
        both = build(name, tiny=tiny)
        config = {"architectures": [architecture], "dtype": both.config["dtype"], **both.config["vision_config"]}
        assumed = tuple(entry.removeprefix("vision_config.") for entry in both.assumed)
        return preset(name, config, dict(both.processor), both.checkpoint, both.source, assumed, tiny)

    return alone


def preset(
    name: str,
    config: dict[str, Any],
    processor: dict[str, Any],
    checkpoint: str,
    source: str,
    assumed: tuple[str, ...],
    tiny: bool,
) -> Preset:
    return Preset(
        name=f"{name}@tiny" if tiny else name,
        model_type=config["model_type"],
        architecture=config["architectures"][0],
        config=config,
        processor=copy.deepcopy(processor),
        checkpoint=checkpoint,
        source=f"made for tests: the structure of {name} in small sizes" if tiny else source,
        assumed=() if tiny else assumed,
    )
