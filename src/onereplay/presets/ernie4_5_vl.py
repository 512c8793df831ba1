"""ERNIE-4.5-VL, as published by Baidu."""

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

_IMAGE_START, _IMAGE_END = 58, 59


def _ernie4_5_vl(size: str, *, text_hidden: int, assumed: tuple[str, ...]) -> Build:
    """One tower for both sizes; the resampler's last layer has the width of the language model."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        vision = {
            "model_type": "ernie4_5_vl_moe_vision",
            "depth": 3 if tiny else 32,
            "hidden_size": 64 if tiny else 1280,
            "intermediate_size": 256 if tiny else 5120,
            "num_heads": 4 if tiny else 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_merge_size": 2,
            "in_channels": 3,
            "hidden_act": "quick_gelu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        }
        heads = 2 if tiny else hidden // 128
        text = {
            **stand_in("ernie4_5_vl_moe_text", hidden, heads=heads, layers=1),
            "rms_norm_eps": 1e-5,
            "use_bias": False,
            "moe_intermediate_size": [32, 16],
            "moe_k": 1,
            "moe_num_experts": 2,
            "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "mrope_section": [3, 3, 2] if tiny else [22, 22, 20],
            },
        }
        config = {
            **whole("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", vision, text, tiny),
            "video_token_id": VIDEO,
            "image_start_token_id": _IMAGE_START,
            "image_end_token_id": _IMAGE_END,
            "video_start_token_id": VISION_START,
            "video_end_token_id": VISION_END,
        }
        processor = {
            "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 6177},
            "patch_size": 14,
            "temporal_patch_size": 1,
            "merge_size": 2,
            "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD,
            "resample": 3,
        }
        source = (
            "the DFNRope vision configuration in PaddlePaddle/FastDeploy and PaddlePaddle/ERNIE, and the conversion of "
            "baidu/ERNIE-4.5-VL-28B-A3B-PT in transformers"
        )
        return preset(name, config, processor, f"baidu/ERNIE-4.5-VL-{size}-PT", source, assumed, tiny)

    return build


_PROCESSOR = ("processor.size", "processor.image_mean", "processor.image_std", "processor.resample")

PRESETS: dict[str, Build] = {
    "ernie4_5_vl-28b-a3b": _ernie4_5_vl(
        "28B-A3B",
        text_hidden=2560,
        assumed=("text_config.hidden_size", "text_config.rms_norm_eps", *_PROCESSOR),
    ),
    "ernie4_5_vl-424b-a47b": _ernie4_5_vl(
        "424B-A47B",
        text_hidden=8192,
        assumed=(
            "vision_config.depth",
            "vision_config.hidden_size",
            "vision_config.intermediate_size",
            "vision_config.num_heads",
            "text_config.hidden_size",
            "text_config.rms_norm_eps",
            *_PROCESSOR,
        ),
    ),
}
