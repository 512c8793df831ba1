"""Gemma 4, as published by Google."""

from collections.abc import Mapping
from typing import Any

from onereplay.presets.base import VIDEO, Build, Preset, preset, stand_in, whole

_SMALL = {
    "hidden_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "intermediate_size": 3072,
    "use_clipped_linears": True,
    "standardize": False,
}
_LARGE = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "intermediate_size": 4304,
    "use_clipped_linears": False,
    "standardize": True,
}
_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
_SMALL_SOURCE = "config.json of the checkpoint, quoted for gemma-4-E2B in the tests of several engines"
_LARGE_SOURCE = "config.json of the checkpoint, as quoted in the converters and tests of several engines"


def _gemma4(
    size: str, *, vision_sizes: Mapping[str, Any], text_hidden: int, source: str, assumed: tuple[str, ...]
) -> Build:
    """Patches of 16 pixels, pooled 3x3, at most 280 tokens an image; small towers clip, large ones standardize."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        inner = {"intermediate_size": 144 if vision_sizes["intermediate_size"] % 64 else 128}
        vision = {
            "model_type": "gemma4_vision",
            **vision_sizes,
            **({**_TINY, **inner} if tiny else {}),
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 10240,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "attention_dropout": 0.0,
        }
        heads = hidden // 16 if tiny else hidden // 64
        text = {
            **stand_in("gemma4_text", hidden, heads=heads, layers=1),
            "head_dim": 16,
            "global_head_dim": 16,
            "layer_types": ["full_attention"],
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }
        config = {
            **whole("gemma4", "Gemma4ForConditionalGeneration", vision, text, tiny),
            "video_token_id": VIDEO,
            "boi_token_id": 58,
            "eoi_token_id": 59,
            "boa_token_id": 55,
            "eoa_token_index": 56,
            "audio_token_id": 57,
        }
        processor = {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "max_soft_tokens": 70 if tiny else 280,
            "do_normalize": False,
            "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0],
            "resample": 3,
        }
        return preset(name, config, processor, f"google/gemma-4-{size}-it", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "gemma4-e2b": _gemma4("E2B", vision_sizes=_SMALL, text_hidden=1536, source=_SMALL_SOURCE, assumed=()),
    "gemma4-e4b": _gemma4(
        "E4B",
        vision_sizes=_SMALL,
        text_hidden=2560,
        source="as gemma-4-E2B",
        assumed=(*(f"vision_config.{field}" for field in _SMALL), "text_config.hidden_size"),
    ),
    "gemma4-31b": _gemma4("31B", vision_sizes=_LARGE, text_hidden=5376, source=_LARGE_SOURCE, assumed=()),
    "gemma4-26b-a4b": _gemma4("26B-A4B", vision_sizes=_LARGE, text_hidden=2816, source=_LARGE_SOURCE, assumed=()),
}
