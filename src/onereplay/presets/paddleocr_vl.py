"""PaddleOCR-VL, as published by PaddlePaddle."""

from onereplay.presets.base import VIDEO, VISION_END, VISION_START, Build, Preset, preset, stand_in, whole

# The small tower keeps what is odd in the large one: a head dimension of 8 times an odd number (72; here 24), an inner
# width that is a multiple of 16 and not of 64 (4,304; here 144), and a table of positions with an odd side that comes
# from an image size which patches do not divide (384 // 14; here 100 // 14).
_TINY = {
    "hidden_size": 72,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 100,
}
_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
}


def _paddleocr_vl(*, text_hidden: int, assumed: tuple[str, ...]) -> Build:
    """SigLIP so400m with rotary positions; 2x2 patches make a token."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        vision = {
            "model_type": "paddleocr_vl_vision",
            **(_TINY if tiny else _SO400M),
            "num_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        }
        text = {
            **stand_in("paddleocr_vl_text", hidden, heads=2 if tiny else 16, layers=1),
            "head_dim": 16 if tiny else 128,
            "rms_norm_eps": 1e-5,
            "use_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "mrope_section": [2, 3, 3] if tiny else [16, 24, 24],
            },
        }
        config = {
            **whole("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", vision, text, tiny),
            "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        }
        processor = {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
            if tiny
            else {"shortest_edge": 147384, "longest_edge": 2822400},
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 3,
        }
        source = (
            "preprocessor_config.json of the checkpoint as quoted publicly, and the configuration that transformers "
            "names PaddlePaddle/PaddleOCR-VL for"
        )
        return preset(name, config, processor, "PaddlePaddle/PaddleOCR-VL", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "paddleocr_vl-0.9b": _paddleocr_vl(
        text_hidden=1024,
        assumed=(
            "vision_config.hidden_size",
            "vision_config.intermediate_size",
            "vision_config.num_hidden_layers",
            "vision_config.num_attention_heads",
            "vision_config.image_size",
            "vision_config.rope_parameters",
            "text_config.hidden_size",
            "text_config.rope_parameters",
        ),
    ),
}
