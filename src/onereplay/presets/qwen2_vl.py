"""Qwen2-VL, as published by Qwen."""

from onereplay.presets.base import (
    CLIP_MEAN,
    CLIP_STD,
    VIDEO,
    VISION_END,
    VISION_START,
    Build,
    Preset,
    preset,
    stand_in,
    whole,
)


def _qwen2_vl(size: str, *, text_hidden: int, assumed: tuple[str, ...] = ()) -> Build:
    """One tower of 675M parameters for every size; only the width behind its merger differs."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        vision = {
            "model_type": "qwen2_vl_vision",
            "depth": 2 if tiny else 32,
            # The head dimension is 80, no power of two; the small one is 40.
            "embed_dim": 80 if tiny else 1280,
            "hidden_size": hidden,
            "mlp_ratio": 4,
            "num_heads": 2 if tiny else 16,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
            "hidden_act": "quick_gelu",
        }
        text = {
            **stand_in("qwen2_vl_text", hidden, heads=2 if tiny else hidden // 128, layers=1),
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [2, 3, 3] if tiny else [16, 24, 24],
            },
        }
        config = {
            **whole("qwen2_vl", "Qwen2VLForConditionalGeneration", vision, text, tiny),
            "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        }
        processor = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD,
        }
        source = "config.json and preprocessor_config.json of the checkpoint, as quoted publicly"
        return preset(name, config, processor, f"Qwen/Qwen2-VL-{size}-Instruct", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "qwen2_vl-2b": _qwen2_vl("2B", text_hidden=1536),
    "qwen2_vl-7b": _qwen2_vl("7B", text_hidden=3584),
    "qwen2_vl-72b": _qwen2_vl(
        "72B", text_hidden=8192, assumed=("vision_config.depth", "vision_config.embed_dim", "vision_config.num_heads")
    ),
}
