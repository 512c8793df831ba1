"""DeepSeek-OCR and DeepSeek-OCR-2, as published by DeepSeek-AI."""

from typing import Any

from onereplay.presets.base import BOS, EOS, PAD, VOCABULARY, Build, Preset, preset, stand_in, whole

_GREY = [127, 127, 127]


def _processor(tiny: bool, tile: int, tiny_tile: int, most: int) -> dict[str, Any]:
    side = 256 if tiny else 1024
    return {
        "image_processor_type": "DeepseekOcr2ImageProcessor",
        "size": {"height": side, "width": side},
        "tile_size": tiny_tile if tiny else tile,
        "crop_to_patches": True,
        "min_patches": 2,
        "max_patches": most,
        "background_color": _GREY,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
    }


def _deepseek_ocr(name: str, *, tiny: bool) -> Preset:
    """A global view of 1,024 pixels, local tiles of 640. The small one keeps window, merge and proportion of the tiles:
    256 and 160 pixels, 16 and 9 tokens, where neither grid of patches is whole windows."""
    hidden, clip = (32, 64) if tiny else (1280, 1024)
    sam = {
        "downsample_channels": [48, clip] if tiny else [512, 1024],
        "global_attn_indexes": [1] if tiny else [2, 5, 8, 11],
        "heads": 2 if tiny else 12,
        "layers": 2 if tiny else 12,
        "width": 32 if tiny else 768,
        "patch_size": 16,
        "window_size": 14,
        "out_channels": 24 if tiny else 256,
    }
    # The table of positions has 4x4 rows in the small one and 16x16 in the large one: those of a global view.
    encoder = {
        "heads": 4 if tiny else 16,
        "image_size": 56 if tiny else 224,
        "layers": 2 if tiny else 24,
        "patch_size": 14,
        "width": clip,
        "ffn_hidden_size": 128 if tiny else 4096,
    }
    config = {
        "architectures": ["DeepseekOCRForCausalLM"],
        "model_type": "deepseek_ocr",
        "dtype": "float32" if tiny else "bfloat16",
        "candidate_resolutions": [[256, 256]] if tiny else [[1024, 1024]],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "vision_config": {
            "model_type": "vision",
            "model_name": "deeplip_b_l",
            "image_size": 256 if tiny else 1024,
            "mlp_ratio": 3.7362,
            "width": {"clip-l-14-224": encoder, "sam_vit_b": sam},
        },
        "projector_config": {
            "model_type": "mlp_projector",
            "projector_type": "linear",
            "input_dim": 2 * clip,
            "n_embed": hidden,
        },
        "language_config": {"hidden_size": hidden},
    }
    source = (
        "config.json of the checkpoint, as quoted publicly; sizes that deepencoder.py of the checkpoint writes into "
        "its code; the image processor is that of DeepSeek-OCR-2 in transformers with the tiles of the published code"
    )
    assumed = ("processor.max_patches", "processor.resample")
    return preset(name, config, _processor(tiny, 640, 160, 9), "deepseek-ai/DeepSeek-OCR", source, assumed, tiny)


def _deepseek_ocr2(name: str, *, tiny: bool) -> Preset:
    """A global view of 1,024 pixels, local tiles of 768; queries are 256 and 144, and in the small one 144 for both."""
    hidden, width = (32, 64) if tiny else (1280, 896)
    vision = {
        "model_type": "deepseek_ocr2_vision",
        "sam_config": {
            "model_type": "deepseek_ocr2_sam_vision_model",
            "hidden_size": 32 if tiny else 768,
            "num_hidden_layers": 2 if tiny else 12,
            "num_attention_heads": 2 if tiny else 12,
            "num_channels": 3,
            "image_size": 256 if tiny else 1024,
            "patch_size": 16,
            "output_channels": 24 if tiny else 256,
            "downsample_channels": [48, width] if tiny else [512, 896],
            "window_size": 14,
            "global_attn_indexes": [1] if tiny else [2, 5, 8, 11],
            "mlp_dim": 128 if tiny else 3072,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
            "qkv_bias": True,
            "use_abs_pos": True,
            "use_rel_pos": True,
            "attention_dropout": 0.0,
        },
        "encoder_config": {
            "model_type": "deepseek_ocr2_encoder",
            "hidden_size": width,
            "intermediate_size": 128 if tiny else 4864,
            "num_hidden_layers": 2 if tiny else 24,
            "num_attention_heads": 4 if tiny else 14,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "vocab_size": VOCABULARY,
        },
    }
    heads = 2 if tiny else 10
    text = {
        **stand_in("deepseek_ocr2_text", hidden, heads=heads, layers=1),
        "head_dim": hidden // heads,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_layer_types": ["dense"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    config = whole("deepseek_ocr2", "DeepseekOcr2ForConditionalGeneration", vision, text, tiny)
    source = (
        "class defaults of DeepseekOcr2SamVisionConfig and DeepseekOcr2ImageProcessor in transformers 5.24, which are "
        "the checkpoint's; deepencoderv2 of the publisher, whose encoder is Qwen2-0.5B"
    )
    assumed = (
        "vision_config.encoder_config.intermediate_size",
        "vision_config.encoder_config.num_key_value_heads",
        "vision_config.encoder_config.max_position_embeddings",
        "vision_config.encoder_config.rope_parameters",
        "text_config.hidden_size",
    )
    checkpoint = "deepseek-community/DeepSeek-OCR-2"
    return preset(name, config, _processor(tiny, 768, 192, 6), checkpoint, source, assumed, tiny)


PRESETS: dict[str, Build] = {"deepseek_ocr": _deepseek_ocr, "deepseek_ocr2": _deepseek_ocr2}
