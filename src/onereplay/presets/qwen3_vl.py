"""Qwen3-VL and Qwen3.5, dense and mixtures of experts, as published by Qwen."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from onereplay.presets.base import (
    VIDEO,
    VISION_END,
    VISION_START,
    Build,
    Preset,
    preset,
    stand_in,
    whole,
)

Names: TypeAlias = tuple[str, ...]

# The small tower keeps what is odd in the large one: a head dimension of 8 times an odd number (72; here 24), an inner
# width that is a multiple of 16 and not of 64 (4,304; here 144), and a table that grids do not divide.
_TINY = {"depth": 4, "hidden_size": 72, "intermediate_size": 144, "num_heads": 3, "num_position_embeddings": 49}
_BASE = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "num_position_embeddings": 2304}
_LARGE = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "num_position_embeddings": 2304}
_SO400M = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
}
_DEEPSTACK = {24: [5, 11, 17], 27: [8, 16, 24]}
_SIZES = ("vision_config.depth", "vision_config.hidden_size", "vision_config.intermediate_size")
_LEVELS = "vision_config.deepstack_visual_indexes"
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _qwen3_vl(
    size: str, *, tower: Mapping[str, int], text_hidden: int, experts: bool = False, assumed: Names = ()
) -> Build:
    """Three levels of deepstack, from layers before the last; the language model takes one in each of its first
    layers."""
    model_type = "qwen3_vl_moe" if experts else "qwen3_vl"

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        levels = {"deepstack_visual_indexes": [0, 1, 2] if tiny else _DEEPSTACK[tower["depth"]]}
        text = {
            **_text(f"{model_type}_text", hidden, tiny, layers=3, sections=[24, 20, 20]),
            **({**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []} if experts else {}),
        }
        architecture = "Qwen3VLMoeForConditionalGeneration" if experts else "Qwen3VLForConditionalGeneration"
        vision = {**_vision(model_type, tower, hidden, tiny), **levels}
        return _preset(name, model_type, architecture, vision, text, f"Qwen/Qwen3-VL-{size}-Instruct", assumed, tiny)

    return build


def _qwen3_5(
    size: str, *, tower: Mapping[str, int], text_hidden: int, experts: bool = False, assumed: Names = ()
) -> Build:
    """The tower of Qwen3-VL without deepstack; the language model has linear and full attention."""
    model_type = "qwen3_5_moe" if experts else "qwen3_5"

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        text = {
            **_text(f"{model_type}_text", hidden, tiny, layers=2, sections=[11, 11, 10]),
            "layer_types": ["linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            **({**_EXPERTS, "shared_expert_intermediate_size": 32} if experts else {}),
        }
        text["rope_parameters"]["partial_rotary_factor"] = 1.0 if tiny else 0.25
        architecture = "Qwen3_5MoeForConditionalGeneration" if experts else "Qwen3_5ForConditionalGeneration"
        vision = _vision(model_type, tower, hidden, tiny)
        return _preset(name, model_type, architecture, vision, text, f"Qwen/Qwen3.5-{size}", assumed, tiny)

    return build


def _vision(model_type: str, tower: Mapping[str, int], out: int, tiny: bool) -> dict[str, Any]:
    return {
        "model_type": f"{model_type}_vision",
        **(_TINY if tiny else tower),
        "out_hidden_size": out,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    }


def _text(model_type: str, hidden: int, tiny: bool, *, layers: int, sections: list[int]) -> dict[str, Any]:
    return {
        **stand_in(model_type, hidden, heads=2 if tiny else hidden // 128, layers=layers),
        "head_dim": 16 if tiny else 256 if sections[0] == 11 else 128,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2] if tiny else sections,
        },
    }


def _preset(
    name: str,
    model_type: str,
    architecture: str,
    vision: dict[str, Any],
    text: dict[str, Any],
    checkpoint: str,
    assumed: Names,
    tiny: bool,
) -> Preset:
    config = {
        **whole(model_type, architecture, vision, text, tiny),
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    source = "config.json and preprocessor_config.json of the checkpoint, as quoted publicly"
    return preset(name, config, processor, checkpoint, source, assumed, tiny)


PRESETS: dict[str, Build] = {
    "qwen3_vl-2b": _qwen3_vl(
        "2B", tower=_LARGE, text_hidden=2048, assumed=("vision_config.intermediate_size", _LEVELS)
    ),
    "qwen3_vl-4b": _qwen3_vl("4B", tower=_LARGE, text_hidden=2560),
    "qwen3_vl-8b": _qwen3_vl("8B", tower=_SO400M, text_hidden=4096),
    "qwen3_vl-32b": _qwen3_vl("32B", tower=_SO400M, text_hidden=5120),
    "qwen3_vl_moe-30b-a3b": _qwen3_vl(
        "30B-A3B", tower=_SO400M, text_hidden=2048, experts=True, assumed=(*_SIZES, _LEVELS)
    ),
    "qwen3_vl_moe-235b-a22b": _qwen3_vl(
        "235B-A22B", tower=_SO400M, text_hidden=4096, experts=True, assumed=(*_SIZES, _LEVELS)
    ),
    "qwen3_5-0.8b": _qwen3_5("0.8B", tower=_BASE, text_hidden=1024),
    "qwen3_5-2b": _qwen3_5("2B", tower=_LARGE, text_hidden=2048, assumed=_SIZES),
    "qwen3_5-4b": _qwen3_5("4B", tower=_LARGE, text_hidden=2560),
    "qwen3_5-9b": _qwen3_5("9B", tower=_SO400M, text_hidden=4096),
    "qwen3_5-27b": _qwen3_5("27B", tower=_SO400M, text_hidden=5120),
    "qwen3_5_moe-35b-a3b": _qwen3_5("35B-A3B", tower=_SO400M, text_hidden=2048, experts=True),
    "qwen3_5_moe-122b-a10b": _qwen3_5("122B-A10B", tower=_SO400M, text_hidden=3072, experts=True, assumed=_SIZES),
    "qwen3_5_moe-397b-a17b": _qwen3_5("397B-A17B", tower=_SO400M, text_hidden=4096, experts=True, assumed=_SIZES),
}
