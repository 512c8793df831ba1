"""DeepSeek-VL in its two forms, as converted for transformers by deepseek-community."""

from typing import Any

from onereplay.presets.base import CLIP_MEAN, CLIP_STD, Build, Preset, preset, stand_in, whole

_SOURCE = (
    "the configuration that convert_deepseek_vl{}_weights_to_hf.py of transformers writes; what it leaves to class "
    "defaults (layer norm, SAM's window, global layers and channels) is that of SigLIP and of SAM base in "
    "deepseek_vl/models of deepseek-ai/DeepSeek-VL"
)


def _siglip(tiny: bool) -> dict[str, Any]:
    """SigLIP large; the tiny tower sees 2x2 patches."""
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": 64 if tiny else 1024,
        "num_hidden_layers": 2 if tiny else 24,
        "num_attention_heads": 4 if tiny else 16,
        "intermediate_size": 128 if tiny else 4096,
        "image_size": 32 if tiny else 384,
        "patch_size": 16,
        "num_channels": 3,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "vision_use_head": False,
    }


def _sam(tiny: bool) -> dict[str, Any]:
    """SAM base; windows do not divide the grid, in the tiny tower (3 and 5) as in the large one (14 and 64)."""
    return {
        "model_type": "sam_vision_model",
        "hidden_size": 48 if tiny else 768,
        "output_channels": 16 if tiny else 256,
        "num_hidden_layers": 4 if tiny else 12,
        "num_attention_heads": 3 if tiny else 12,
        "num_channels": 3,
        "image_size": 80 if tiny else 1024,
        "patch_size": 16,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "qkv_bias": True,
        "mlp_ratio": 4.0,
        "mlp_dim": 192 if tiny else 3072,
        "use_abs_pos": True,
        "use_rel_pos": True,
        "window_size": 3 if tiny else 14,
        "global_attn_indexes": [1, 3] if tiny else [2, 5, 8, 11],
        "num_pos_feats": 8 if tiny else 128,
    }


def _text(hidden: int, tiny: bool) -> dict[str, Any]:
    return {
        **stand_in("llama", hidden, heads=hidden // 16 if tiny else hidden // 128, layers=1),
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _processor(kind: str, tiny: bool) -> dict[str, Any]:
    side = 32 if tiny else 384
    return {
        "image_processor_type": kind,
        "size": {"height": side, "width": side},
        "min_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
    }


def _deepseek_vl(name: str, *, tiny: bool) -> Preset:
    """SigLIP large on squares of 384 pixels, 576 tokens; the tiny square has 32 pixels and 4 tokens."""
    text = _text(32 if tiny else 2048, tiny)
    config = whole("deepseek_vl", "DeepseekVLForConditionalGeneration", _siglip(tiny), text, tiny)
    processor = _processor("DeepseekVLImageProcessor", tiny)
    checkpoint = "deepseek-community/deepseek-vl-1.3b-chat"
    assumed = ("text_config.hidden_size", "vision_config.layer_norm_eps", "processor.resample", "processor.min_size")
    return preset(name, config, processor, checkpoint, _SOURCE.format(""), assumed, tiny)


def _deepseek_vl_hybrid(name: str, *, tiny: bool) -> Preset:
    """The same with SAM base on squares of 1,024 pixels beside it."""
    text = _text(32 if tiny else 4096, tiny)
    config = {
        **whole("deepseek_vl_hybrid", "DeepseekVLHybridForConditionalGeneration", _siglip(tiny), text, tiny),
        "high_res_vision_config": _sam(tiny),
    }
    large = 80 if tiny else 1024
    processor = {
        **_processor("DeepseekVLHybridImageProcessor", tiny),
        "high_res_size": {"height": large, "width": large},
        "high_res_image_mean": CLIP_MEAN,
        "high_res_image_std": CLIP_STD,
        "high_res_resample": 3,
    }
    checkpoint = "deepseek-community/deepseek-vl-7b-chat"
    assumed = ("vision_config.layer_norm_eps", "processor.min_size", "processor.high_res_resample")
    return preset(name, config, processor, checkpoint, _SOURCE.format("_hybrid"), assumed, tiny)


PRESETS: dict[str, Build] = {"deepseek_vl-1.3b": _deepseek_vl, "deepseek_vl-7b": _deepseek_vl_hybrid}
