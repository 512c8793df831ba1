"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR, as published by Z.ai."""

from typing import Any

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


def _glm(
    model_type: str,
    architecture: str,
    checkpoint: str,
    *,
    tower: str,
    text: str,
    hidden: int,
    intermediate: int,
    text_hidden: int,
    processor: str,
    source: str,
    assumed: tuple[str, ...] = (),
    bias: bool = False,
) -> Build:
    """Full attention in a frame; a table of 24x24 positions for GLM-V, none for GLM-OCR.

    `intermediate` is the width of the merger. The blocks' own is the width of the output for GLM-V.
    """

    def build(name: str, *, tiny: bool) -> Preset:
        out = 32 if tiny else text_hidden
        vision = {
            "model_type": tower,
            "depth": 2 if tiny else 24,
            "hidden_size": 64 if tiny else hidden,
            "intermediate_size": 64 if tiny else intermediate,
            "num_heads": 4 if tiny else hidden // (64 if model_type == "glm_ocr" else 128),
            "out_hidden_size": out,
            "attention_bias": bias,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "image_size": 336,
            "in_channels": 3,
            "patch_size": 14,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        }
        config = {
            **whole(model_type, architecture, vision, _language_model(text, out, tiny), tiny),
            "video_token_id": VIDEO,
            "image_start_token_id": VISION_START,
            "image_end_token_id": VISION_END,
            "video_start_token_id": VISION_START - 2,
            "video_end_token_id": VISION_END - 2,
        }
        settings = {
            "image_processor_type": processor,
            "size": {"shortest_edge": 12544, "longest_edge": 9633792},
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD,
        }
        return preset(name, config, settings, checkpoint, source, assumed, tiny)

    return build


def _language_model(model_type: str, hidden: int, tiny: bool) -> dict[str, Any]:
    text = {
        **stand_in(model_type, hidden, heads=2 if tiny else hidden // 128, layers=1),
        "head_dim": 16 if tiny else 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0 if model_type == "glm_ocr_text" else 0.5,
            "mrope_section": _sections(model_type, tiny),
        },
    }
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0}
    return {**text, **experts} if model_type == "glm4v_moe_text" else text


def _sections(model_type: str, tiny: bool) -> list[int]:
    """They add up to half of the rotated part of a head."""
    if model_type == "glm_ocr_text":
        return [2, 3, 3] if tiny else [16, 24, 24]
    return [1, 1, 2] if tiny else [8, 12, 12]


_QUOTED = "config.json and preprocessor_config.json of the checkpoint, as quoted publicly"
_UNREAD = tuple(
    f"vision_config.{name}" for name in ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size")
)

PRESETS: dict[str, Build] = {
    "glm4v-9b": _glm(
        "glm4v",
        "Glm4vForConditionalGeneration",
        "zai-org/GLM-4.1V-9B-Thinking",
        tower="glm4v_vision",
        text="glm4v_text",
        hidden=1536,
        intermediate=13696,
        text_hidden=4096,
        processor="Glm4vImageProcessor",
        source=_QUOTED,
    ),
    "glm4v_moe-106b": _glm(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        "zai-org/GLM-4.5V",
        tower="glm4v_moe_vision",
        text="glm4v_moe_text",
        hidden=1536,
        intermediate=10944,
        text_hidden=4096,
        processor="Glm4vImageProcessor",
        source=_QUOTED,
        assumed=("processor.image_processor_type",),
    ),
    # The two sizes of GLM-4.6V are published under the model types of GLM-4.1V and GLM-4.5V; transformers has a class
    # of its own for them too, with the tower of GLM-4.1V.
    "glm46v-9b": _glm(
        "glm46v",
        "Glm46VForConditionalGeneration",
        "zai-org/GLM-4.6V-Flash",
        tower="glm4v_vision",
        text="glm4v_text",
        hidden=1536,
        intermediate=13696,
        text_hidden=4096,
        processor="Glm46VImageProcessor",
        source="sizes of the checkpoint as quoted in public ports of it",
        assumed=("model_type", "processor.size"),
    ),
    "glm46v-106b": _glm(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        "zai-org/GLM-4.6V",
        tower="glm4v_moe_vision",
        text="glm4v_moe_text",
        hidden=1536,
        intermediate=10944,
        text_hidden=4096,
        processor="Glm46VImageProcessor",
        source="the tower of GLM-4.5V, on whose language model it builds",
        assumed=("model_type", *_UNREAD, "processor.size"),
    ),
    "glm_ocr-0.9b": _glm(
        "glm_ocr",
        "GlmOcrForConditionalGeneration",
        "zai-org/GLM-OCR",
        tower="glm_ocr_vision",
        text="glm_ocr_text",
        hidden=1024,
        intermediate=4096,
        text_hidden=1536,
        processor="Glm46VImageProcessor",
        source=_QUOTED,
        bias=True,
    ),
}
