"""LFM3-VL, as published by Liquid AI."""

from onereplay.presets.base import VIDEO, VISION_END, VISION_START, Build, Preset, preset, stand_in, whole


def _lfm3_vl(size: str, *, text_hidden: int, assumed: tuple[str, ...]) -> Build:
    """Eight layers of convolutions and six of attention, two query heads a key head."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        layers = 4 if tiny else 14
        vision = {
            "model_type": "lfm3_vl_vision",
            "num_hidden_layers": layers,
            "layer_types": ["conv" if layer < 2 or layer % 2 else "full_attention" for layer in range(layers)],
            "hidden_size": 64 if tiny else 1024,
            "intermediate_size": 160 if tiny else 2560,
            "num_attention_heads": 4 if tiny else 16,
            "num_key_value_heads": 2 if tiny else 8,
            "conv_kernel_size": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
            "norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 1000000.0},
        }
        text = {
            **stand_in("lfm3", hidden, heads=2 if tiny else 16, layers=2),
            "head_dim": 16 if tiny else 128,
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 7,
            "conv_bias": False,
            "norm_eps": 1e-5,
            "sliding_window": 256,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1000000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        }
        config = {
            **whole("lfm3_vl", "Lfm3VlForConditionalGeneration", vision, text, tiny),
            "projector_hidden_size": 96 if tiny else 4096,
            "projector_hidden_act": "gelu",
            "projector_bias": True,
            "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        }
        processor = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 4 * 32 * 32,
            "max_pixels": 1024 * 32 * 32,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        source = (
            "the configuration that transformers names LiquidAI/LFM3-VL-2B for; the layers as told by "
            "gatilin/lfm3-vl-2b-vision-encoder, the language model's width by its GGUF file"
        )
        return preset(name, config, processor, f"LiquidAI/LFM3-VL-{size}", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "lfm3_vl-2b": _lfm3_vl(
        "2B",
        text_hidden=2048,
        assumed=(
            "vision_config.hidden_size",
            "vision_config.intermediate_size",
            "vision_config.num_attention_heads",
            "vision_config.num_key_value_heads",
            "projector_hidden_size",
            "processor.min_pixels",
            "processor.max_pixels",
            "processor.image_mean",
            "processor.image_std",
        ),
    ),
}
