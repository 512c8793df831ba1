"""InternVL3 and InternVL3.5, as published by OpenGVLab."""

from typing import Any

from onereplay.presets.base import IMAGENET_MEAN, IMAGENET_STD, Build, Preset, preset, stand_in, whole


def _vit_300m(tiny: bool) -> dict[str, Any]:
    """InternViT-300M, the tower of the sizes below 38B and of the mixtures up to 30B."""
    return {
        "hidden_size": 64 if tiny else 1024,
        "num_hidden_layers": 2 if tiny else 24,
        "num_attention_heads": 4 if tiny else 16,
        "intermediate_size": 128 if tiny else 4096,
        "attention_bias": True,
        "use_qk_norm": False,
        "norm_type": "layer_norm",
    }


def _vit_6b(tiny: bool) -> dict[str, Any]:
    """InternViT-6B: RMS norms, norms of queries and keys over all heads, no bias, an odd number of heads."""
    return {
        "hidden_size": 80 if tiny else 3200,
        "num_hidden_layers": 3 if tiny else 45,
        "num_attention_heads": 5 if tiny else 25,
        "intermediate_size": 128 if tiny else 12800,
        "attention_bias": False,
        "use_qk_norm": True,
        "norm_type": "rms_norm",
    }


def _internvl(checkpoint: str, *, text_hidden: int, large: bool = False) -> Build:
    """Square tiles of 448 pixels, 256 tokens a tile; the tiny tile has 56 pixels and 4 tokens."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        side = 56 if tiny else 448
        vision = {
            "model_type": "internvl_vision",
            **(_vit_6b(tiny) if large else _vit_300m(tiny)),
            "image_size": [side, side],
            "patch_size": [14, 14],
            "num_channels": 3,
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
            **stand_in("qwen2", hidden, heads=hidden // 16 if tiny else hidden // 64, layers=1),
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        }
        config = {
            **whole("internvl", "InternVLForConditionalGeneration", vision, text, tiny),
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
            "image_mean": IMAGENET_MEAN,
            "image_std": IMAGENET_STD,
            "resample": 3,
        }
        source = (
            f"vit_{'6b' if large else '300m'}_config in OpenGVLab/InternVL, internvl_chat/tools/internvl_custom2hf.py; "
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
        return preset(name, config, processor, f"OpenGVLab/{checkpoint}", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "internvl3-1b": _internvl("InternVL3-1B-hf", text_hidden=896),
    "internvl3-2b": _internvl("InternVL3-2B-hf", text_hidden=1536),
    "internvl3-8b": _internvl("InternVL3-8B-hf", text_hidden=3584),
    "internvl3-14b": _internvl("InternVL3-14B-hf", text_hidden=5120),
    "internvl3-38b": _internvl("InternVL3-38B-hf", text_hidden=5120, large=True),
    "internvl3-78b": _internvl("InternVL3-78B-hf", text_hidden=8192, large=True),
    "internvl3_5-1b": _internvl("InternVL3_5-1B-HF", text_hidden=1024),
    "internvl3_5-2b": _internvl("InternVL3_5-2B-HF", text_hidden=2048),
    "internvl3_5-4b": _internvl("InternVL3_5-4B-HF", text_hidden=2560),
    "internvl3_5-8b": _internvl("InternVL3_5-8B-HF", text_hidden=4096),
    "internvl3_5-14b": _internvl("InternVL3_5-14B-HF", text_hidden=5120),
    "internvl3_5-38b": _internvl("InternVL3_5-38B-HF", text_hidden=5120, large=True),
    "internvl3_5-30b-a3b": _internvl("InternVL3_5-30B-A3B-HF", text_hidden=2048),
    "internvl3_5-241b-a28b": _internvl("InternVL3_5-241B-A28B-HF", text_hidden=4096, large=True),
}
