"""Pixtral 12B, as published by Mistral AI and converted by mistral-community; the tower of Mistral 3 as well."""

from typing import Any

from onereplay.presets.base import CLIP_MEAN, CLIP_STD, IMAGE, Build, Preset, preset, stand_in, whole


def pixtral_vision(patch_size: int, image_size: int, tiny: bool) -> dict[str, Any]:
    """A tower of 24 layers."""
    return {
        "model_type": "pixtral",
        "hidden_size": 64 if tiny else 1024,
        "num_hidden_layers": 3 if tiny else 24,
        "num_attention_heads": 4 if tiny else 16,
        "intermediate_size": 128 if tiny else 4096,
        "num_channels": 3,
        "image_size": image_size,
        "patch_size": patch_size,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    }


def pixtral_processor(patch_size: int, image_size: int) -> dict[str, Any]:
    """Images keep their shape; sides become whole patches."""
    return {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": patch_size, "width": patch_size},
        "size": {"longest_edge": image_size},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "resample": 3,
    }


def mistral_text(hidden: int, tiny: bool) -> dict[str, Any]:
    """The language model of both, as a stand-in."""
    return {
        **stand_in("mistral", hidden, heads=hidden // 16 if tiny else hidden // 128, layers=1),
        "head_dim": 16 if tiny else 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000000.0},
    }


def _pixtral() -> Build:
    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else 5120
        vision = pixtral_vision(16, 1024, tiny)
        config = {
            **whole("llava", "LlavaForConditionalGeneration", vision, mistral_text(hidden, tiny), tiny),
            "image_token_index": IMAGE,
            "image_seq_length": 1,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        }
        source = "config.json and preprocessor_config.json of the checkpoint; params.json of mistralai/Pixtral-12B-2409"
        assumed = ("vision_config.attention_dropout", "multimodal_projector_bias")
        return preset(name, config, pixtral_processor(16, 1024), "mistral-community/pixtral-12b", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {"pixtral-12b": _pixtral()}
