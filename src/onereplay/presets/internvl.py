"""InternVL3, as published by OpenGVLab."""

from onereplay.presets.base import IMAGENET_MEAN, IMAGENET_STD, Build, Preset, preset, stand_in, whole


def _internvl3(size: str, *, text_hidden: int) -> Build:
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
        return preset(name, config, processor, f"OpenGVLab/InternVL3-{size}-hf", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "internvl3-1b": _internvl3("1B", text_hidden=896),
    "internvl3-2b": _internvl3("2B", text_hidden=1536),
    "internvl3-8b": _internvl3("8B", text_hidden=3584),
    "internvl3-14b": _internvl3("14B", text_hidden=5120),
}
