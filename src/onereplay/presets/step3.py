"""Step-3.7, Step3-VL-10B and Step3, as published by StepFun."""

from typing import Any

from onereplay.presets.base import CLIP_MEAN, CLIP_STD, Build, Preset, preset, stand_in, whole

_TINY_SIDE = 182
"""13 patches a side, and 9 of a local tile: neither is even, so that how the convolutions treat a rest shows."""


def _processor(tiny: bool) -> dict[str, Any]:
    side, tile = (_TINY_SIDE, 126) if tiny else (728, 504)
    return {
        "image_processor_type": "Step3p7ImageProcessor",
        "size": {"height": side, "width": side},
        "patch_size": tile,
        "max_image_size": 756 if tiny else 3024,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "resample": 2,
    }


def _perception_encoder(tiny: bool) -> dict[str, Any]:
    """47 layers with rotary positions in two axes and a scale behind each sublayer."""
    hidden = 64 if tiny else 1536
    return {
        "hidden_size": hidden,
        "intermediate_size": 128 if tiny else 8960,
        "mlp_ratio": 128 / 64 if tiny else 8960 / 1536,
        "num_hidden_layers": 2 if tiny else 47,
        "num_attention_heads": 4 if tiny else 16,
        "num_channels": 3,
        "image_size": _TINY_SIDE if tiny else 728,
        "patch_size": 14,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "attention_dropout": 0.0,
        "layer_scale_init_value": 0.1,
        "max_position_embeddings": (_TINY_SIDE // 14) ** 2 if tiny else 2704,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    }


def _step3p7(name: str, *, tiny: bool) -> Preset:
    hidden = 32 if tiny else 4096
    heads = 2 if tiny else 64
    text = {
        **stand_in("step3p5", hidden, heads=heads, layers=1),
        "head_dim": hidden // heads,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["dense"],
        "sliding_window": 512,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "share_expert_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    }
    vision = {"model_type": "step3p5_vision", **_perception_encoder(tiny)}
    config = {
        **whole("step3p7", "Step3p7ForConditionalGeneration", vision, text, tiny),
        "projector_bias": False,
    }
    source = "config.json of the checkpoint, as quoted publicly; configuration_step3p7.py of transformers 5.24"
    assumed = ("vision_config.rope_parameters", "processor.resample")
    return preset(name, config, _processor(tiny), "stepfun-ai/Step-3.7-Flash", source, assumed, tiny)


def _step3_vl_10b(name: str, *, tiny: bool) -> Preset:
    """The tower of Step-3.7 with Qwen3-8B behind it."""
    config = {
        **whole(
            "step_robotics",
            "StepVLForConditionalGeneration",
            _perception_encoder(tiny),
            {"hidden_size": 32 if tiny else 4096},
            tiny,
        ),
        "understand_projector_stride": 2,
        "projector_bias": False,
    }
    source = "configuration of the checkpoint's remote code, as quoted publicly; sizes of the tower as in Step-3.7"
    assumed = ("text_config.hidden_size", "vision_config.rope_parameters", "processor.resample")
    return preset(name, config, _processor(tiny), "stepfun-ai/Step3-VL-10B", source, assumed, tiny)


def _step3(name: str, *, tiny: bool) -> Preset:
    """EVA-CLIP of 63 layers; the first convolution takes 2x2 patches, the second every second of them."""
    vision = {
        "model_type": "step3_vision_encoder",
        "hidden_size": 64 if tiny else 1792,
        "intermediate_size": 128 if tiny else 15360,
        "output_hidden_size": 48 if tiny else 4096,
        "num_hidden_layers": 2 if tiny else 63,
        "num_attention_heads": 4 if tiny else 16,
        "num_channels": 3,
        "image_size": _TINY_SIDE if tiny else 728,
        "patch_size": 14,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    }
    config = {
        **whole("step3_vl", "Step3VLForConditionalGeneration", vision, {"hidden_size": 32 if tiny else 7168}, tiny),
        "understand_projector_stride": 2,
        "projector_bias": False,
    }
    source = (
        "Step3VisionEncoderConfig and step3_vl.py of the engines that serve the checkpoint, and its model card; "
        "169 and 81 tokens a tile follow from the stride"
    )
    assumed = (
        "vision_config.intermediate_size",
        "vision_config.hidden_act",
        "understand_projector_stride",
        "projector_bias",
        "processor.resample",
    )
    return preset(name, config, _processor(tiny), "stepfun-ai/step3", source, assumed, tiny)


PRESETS: dict[str, Build] = {"step3p7": _step3p7, "step3_vl-10b": _step3_vl_10b, "step3": _step3}
