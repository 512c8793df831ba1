"""Qwen2.5-VL, as published by Qwen."""

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


def _qwen2_5_vl(size: str, *, text_hidden: int, intermediate: int, assumed: tuple[str, ...]) -> Build:
    """Windows of 8x8 patches in most layers; every eighth layer and the last see the whole frame."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        vision = {
            "model_type": "qwen2_5_vl_vision",
            "depth": 4 if tiny else 32,
            "hidden_size": 64 if tiny else 1280,
            # 3,420 is not a multiple of 8 and 3,456 is: the small sizes keep that apart.
            "intermediate_size": 64 + intermediate % 128 if tiny else intermediate,
            "num_heads": 4 if tiny else 16,
            "out_hidden_size": hidden,
            "fullatt_block_indexes": [1, 3] if tiny else [7, 15, 23, 31],
            "window_size": 112,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
            "tokens_per_second": 2,
            "hidden_act": "silu",
        }
        heads = 2 if tiny else hidden // 128
        text = {
            **stand_in("qwen2_5_vl_text", hidden, heads=heads, layers=1),
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [2, 3, 3] if tiny else [16, 24, 24],
            },
        }
        config = {
            **whole("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", vision, text, tiny),
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
        return preset(name, config, processor, f"Qwen/Qwen2.5-VL-{size}-Instruct", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "qwen2_5_vl-3b": _qwen2_5_vl("3B", text_hidden=2048, intermediate=3420, assumed=("vision_config.hidden_size",)),
    "qwen2_5_vl-7b": _qwen2_5_vl("7B", text_hidden=3584, intermediate=3420, assumed=()),
    "qwen2_5_vl-32b": _qwen2_5_vl(
        "32B",
        text_hidden=5120,
        intermediate=3456,
        assumed=("vision_config.hidden_size", "vision_config.intermediate_size"),
    ),
    "qwen2_5_vl-72b": _qwen2_5_vl(
        "72B",
        text_hidden=8192,
        intermediate=3456,
        assumed=("vision_config.hidden_size", "vision_config.intermediate_size"),
    ),
}
