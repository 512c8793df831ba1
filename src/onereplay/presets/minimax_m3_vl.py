"""MiniMax-M3, as published by MiniMax."""

from typing import Any

from onereplay.presets.base import CLIP_MEAN, CLIP_STD, IMAGE, VIDEO, Build, Preset, preset, stand_in, whole


def _minimax_m3(name: str, *, tiny: bool) -> Preset:
    """Full attention in a clip; three axes of positions, which leave two of a head's 80 dimensions as they are."""
    hidden = 32 if tiny else 6144
    vision = {
        "model_type": "minimax_m3_vl_vision",
        "num_hidden_layers": 2 if tiny else 32,
        "hidden_size": 64 if tiny else 1280,
        "intermediate_size": 128 if tiny else 5120,
        "num_attention_heads": 4 if tiny else 16,
        "num_channels": 3,
        "image_size": 2016,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    }
    config = {
        **whole(
            "minimax_m3_vl",
            "MiniMaxM3SparseForConditionalGeneration",
            vision,
            _language_model(hidden, tiny),
            tiny,
        ),
        "image_token_index": IMAGE,
        "video_token_id": VIDEO,
        "video_token_index": VIDEO,
        "projector_hidden_size": 48 if tiny else 6144,
    }
    processor = {
        "image_processor_type": "MiniMaxM3VLImageProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 451584},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }
    source = (
        "config.json of the checkpoint, as quoted publicly, under the names of transformers (the checkpoint has a CLIP "
        "vision configuration with an img_token_compression_config); the processor's sizes are those of transformers"
    )
    assumed = ("processor.size", "processor.image_mean", "processor.image_std")
    return preset(name, config, processor, "MiniMaxAI/MiniMax-M3", source, assumed, tiny)


def _language_model(hidden: int, tiny: bool) -> dict[str, Any]:
    return {
        **stand_in("minimax_m3_vl_text", hidden, heads=2 if tiny else hidden // 128, layers=1),
        "head_dim": 16 if tiny else 128,
        "rotary_dim": 8 if tiny else 64,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["sparse"],
        "layer_types": ["full_attention"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
    }


PRESETS: dict[str, Build] = {"minimax_m3_vl": _minimax_m3}
