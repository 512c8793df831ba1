"""Published vision configurations as data, each with its source.

A preset is what a benchmark or a test needs when no checkpoint is at hand: the configuration of the vision tower and
its projector as published, the image processor's settings, and a stand-in for the language model. `NAME@tiny` is the
same structure in a size for a CPU.

Every size is written out. The defaults of the transformers configuration classes are not the checkpoints'
(`Qwen2_5_VLVisionConfig()` has a hidden size of 3,584; the published tower has 1,280).

The language model is a stand-in in everything but its hidden size, which sizes the projector: one or two layers, 64
token ids, and special tokens among those. It never gets weights; the tiny ones are complete enough to `generate`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onereplay.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PREFIX = "preset:"
"""Marks a preset where a model is asked for: `preset:NAME`."""

_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_IMAGENET_MEAN = [0.485, 0.456, 0.406]
_IMAGENET_STD = [0.229, 0.224, 0.225]

_VOCABULARY = 64
_BOS, _EOS, _PAD = 1, 2, 0
_VISION_START, _VISION_END, _IMAGE, _VIDEO = 60, 61, 62, 63


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


def preset_names() -> tuple[str, ...]:
    """Every name that `get_preset` knows, without the `@tiny` forms."""
    return tuple(_PRESETS)


def get_preset(spec: str) -> Preset:
    """The preset called `NAME`, or its small form `NAME@tiny`; a new object on every call.

    Raises:
        ConfigError: the name or the form is unknown; the message lists the names.
    """
    name, at, form = spec.partition("@")
    if name not in _PRESETS or (at and form != "tiny"):
        raise ConfigError(
            f"no preset {spec!r}; there are {', '.join(_PRESETS)}, "
            "each also as NAME@tiny (the same structure in a size for a CPU)"
        )
    return _PRESETS[name](name, tiny=bool(at))


def hf_config(preset: Preset) -> PreTrainedConfig:
    """The transformers configuration object of a preset; new on every call."""
    from transformers import AutoConfig

    fields = copy.deepcopy(dict(preset.config))
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _qwen2_5_vl(size: str, *, text_hidden: int, intermediate: int, assumed: tuple[str, ...]) -> Callable[..., Preset]:
    """Windows of 8x8 patches in most layers; every eighth layer and the last see the whole frame."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        vision = {
            "model_type": "qwen2_5_vl_vision",
            "depth": 4 if tiny else 32,
            "hidden_size": 64 if tiny else 1280,
            # 3,420 is not a multiple of 8 and 3,456 is: the small sizes keep that apart.
            "intermediate_size": 64 + intermediate % 128 if tiny else intermediate,
            "num_heads": 4 if tiny else 16,
            "out_hidden_size": hidden,
            "fullatt_block_indexes": [1, 3] if tiny else [7, 15, 23, 31],
            "window_size": 112,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
            "tokens_per_second": 2,
            "hidden_act": "silu",
        }
        heads = 2 if tiny else hidden // 128
        text = {
            **_stand_in("qwen2_5_vl_text", hidden, heads=heads, layers=1),
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [2, 3, 3] if tiny else [16, 24, 24],
            },
        }
        config = {
            **_whole("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", vision, text, tiny),
            "video_token_id": _VIDEO,
            "vision_start_token_id": _VISION_START,
            "vision_end_token_id": _VISION_END,
        }
        processor = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": _CLIP_MEAN,
            "image_std": _CLIP_STD,
        }
        source = "config.json and preprocessor_config.json of the checkpoint, as quoted publicly"
        return _preset(name, config, processor, f"Qwen/Qwen2.5-VL-{size}-Instruct", source, assumed, tiny)

    return build


def _internvl3(size: str, *, text_hidden: int) -> Callable[..., Preset]:
    """InternViT-300M on square tiles of 448 pixels, 256 tokens a tile; the tiny tile has 56 pixels and 4 tokens."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        side = 56 if tiny else 448
        vision = {
            "model_type": "internvl_vision",
            "hidden_size": 64 if tiny else 1024,
            "num_hidden_layers": 2 if tiny else 24,
            "num_attention_heads": 4 if tiny else 16,
            "intermediate_size": 128 if tiny else 4096,
            "image_size": [side, side],
            "patch_size": [14, 14],
            "num_channels": 3,
            "attention_bias": True,
            "use_qk_norm": False,
            "norm_type": "layer_norm",
            "layer_norm_eps": 1e-6,
            "hidden_act": "gelu",
            "layer_scale_init_value": 0.1,
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "hidden_dropout_prob": 0.0,
            "attention_dropout": 0.0,
            "projection_dropout": 0.0,
        }
        text = {
            **_stand_in("qwen2", hidden, heads=hidden // 16 if tiny else hidden // 64, layers=1),
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        }
        config = {
            **_whole("internvl", "InternVLForConditionalGeneration", vision, text, tiny),
            "image_seq_length": (side // 14 // 2) ** 2,
            "downsample_ratio": 0.5,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        }
        processor = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": side, "width": side},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
            "image_mean": _IMAGENET_MEAN,
            "image_std": _IMAGENET_STD,
            "resample": 3,
        }
        source = (
            "vit_300m_config in OpenGVLab/InternVL, internvl_chat/tools/internvl_custom2hf.py; "
            "crop_to_patches is what InternVLProcessor asks of its image processor"
        )
        assumed = (
            "text_config.hidden_size",
            "processor.min_patches",
            "processor.max_patches",
            "processor.image_mean",
            "processor.image_std",
            "processor.resample",
        )
        return _preset(name, config, processor, f"OpenGVLab/InternVL3-{size}-hf", source, assumed, tiny)

    return build


def _lfm2_vl(
    size: str, *, vision_sizes: Mapping[str, int], text_hidden: int, source: str, assumed: tuple[str, ...]
) -> Callable[..., Preset]:
    """SigLIP 2 NaFlex: a picture keeps its shape within 256 tokens, or is split into tiles of 512x512 pixels."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        vision = {
            "model_type": "siglip2_vision_model",
            **(small if tiny else vision_sizes),
            "num_patches": 256,
            "patch_size": 16,
            "num_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "vision_use_head": False,
        }
        text = {
            **_stand_in("lfm2", hidden, heads=hidden // 16 if tiny else hidden // 64, layers=2),
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "conv_bias": False,
            "norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        }
        config = {
            **_whole("lfm2_vl", "Lfm2VlForConditionalGeneration", vision, text, tiny),
            "downsample_factor": 2,
            "projector_hidden_size": 96 if tiny else 2560,
            "projector_hidden_act": "gelu",
            "projector_bias": True,
            "projector_use_layernorm": True,
        }
        tile = 128 if tiny else 512
        processor = {
            "image_processor_type": "Lfm2VlImageProcessor",
            "size": {"height": tile, "width": tile},
            "tile_size": tile,
            "encoder_patch_size": 16,
            "downsample_factor": 2,
            "min_image_tokens": 4 if tiny else 64,
            "max_image_tokens": 16 if tiny else 256,
            "max_pixels_tolerance": 2.0,
            "do_image_splitting": True,
            "min_tiles": 2,
            "max_tiles": 10,
            "use_thumbnail": False,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
        }
        return _preset(name, config, processor, f"LiquidAI/LFM2-VL-{size}", source, assumed, tiny)

    return build


def _stand_in(model_type: str, hidden: int, *, heads: int, layers: int) -> dict[str, Any]:
    """A language model of the real hidden size with nothing else in it."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 32768,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
    }


def _whole(
    model_type: str, architecture: str, vision: dict[str, Any], text: dict[str, Any], tiny: bool
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "float32" if tiny else "bfloat16",
        "image_token_id": _IMAGE,
        "tie_word_embeddings": False,
        "text_config": {**text, "tie_word_embeddings": False},
        "vision_config": vision,
    }


def _preset(
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


_LFM2_VL_450M_SOURCE = "config.json, preprocessor_config.json and processor_config.json of the checkpoint"
_LFM2_VL_1_6B_SOURCE = "as LFM2-VL-450M, with the sizes of SigLIP 2 so400m/16 NaFlex"

_PRESETS: Mapping[str, Callable[..., Preset]] = {
    "qwen2_5_vl-3b": _qwen2_5_vl("3B", text_hidden=2048, intermediate=3420, assumed=("vision_config.hidden_size",)),
    "qwen2_5_vl-7b": _qwen2_5_vl("7B", text_hidden=3584, intermediate=3420, assumed=()),
    "qwen2_5_vl-32b": _qwen2_5_vl(
        "32B",
        text_hidden=5120,
        intermediate=3456,
        assumed=("vision_config.hidden_size", "vision_config.intermediate_size"),
    ),
    "qwen2_5_vl-72b": _qwen2_5_vl(
        "72B",
        text_hidden=8192,
        intermediate=3456,
        assumed=("vision_config.hidden_size", "vision_config.intermediate_size"),
    ),
    "internvl3-1b": _internvl3("1B", text_hidden=896),
    "internvl3-2b": _internvl3("2B", text_hidden=1536),
    "internvl3-8b": _internvl3("8B", text_hidden=3584),
    "internvl3-14b": _internvl3("14B", text_hidden=5120),
    "lfm2_vl-450m": _lfm2_vl(
        "450M",
        vision_sizes={
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
        },
        text_hidden=1024,
        source=_LFM2_VL_450M_SOURCE,
        assumed=("projector_use_layernorm",),
    ),
    "lfm2_vl-1.6b": _lfm2_vl(
        "1.6B",
        vision_sizes={
            "hidden_size": 1152,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 4304,
        },
        text_hidden=2048,
        source=_LFM2_VL_1_6B_SOURCE,
        assumed=(
            "vision_config.hidden_size",
            "vision_config.num_hidden_layers",
            "vision_config.num_attention_heads",
            "vision_config.intermediate_size",
            "text_config.hidden_size",
            "projector_hidden_size",
            "projector_use_layernorm",
            "processor.use_thumbnail",
        ),
    ),
}
