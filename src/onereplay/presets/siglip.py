"""SigLIP and SigLIP 2, as published by Google."""

from typing import Any

from onereplay.presets.base import Build, Preset, preset, tower_alone

SIZES = {
    "base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "so400m": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
}
TINY = {"base": (64, 128, 2, 4), "so400m": (96, 176, 2, 4)}
"""Widths keep what the large ones have: 4,304 is no multiple of 64, a head of so400m is no power of two."""


def _tower(model_type: str, size: str, *, patch: int, vocabulary: int, tiny: bool, **more: int) -> dict[str, Any]:
    """The configuration of both towers, with one layer of text."""
    sizes = dict(zip(SIZES[size], TINY[size], strict=True)) if tiny else SIZES[size]
    shared = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "attention_dropout": 0.0}
    vision = {
        "model_type": f"{model_type}_vision_model",
        **sizes,
        "num_channels": 3,
        "patch_size": patch,
        "vision_use_head": True,
        **more,
        **shared,
    }
    text = {
        "model_type": f"{model_type}_text_model",
        **sizes,
        "num_hidden_layers": 1,
        "vocab_size": 64 if tiny else vocabulary,
        "max_position_embeddings": 64,
        "projection_size": sizes["hidden_size"],
        **shared,
    }
    return {
        "architectures": ["SiglipModel" if model_type == "siglip" else "Siglip2Model"],
        "model_type": model_type,
        "dtype": "float32",
        "text_config": text,
        "vision_config": vision,
    }


def _fixed(checkpoint: str, size: str, *, side: int, patch: int, vocabulary: int = 32000) -> Build:
    """Square images of one size; the tiny one has 56 pixels in patches of 14 or 64 in patches of 16."""

    def build(name: str, *, tiny: bool) -> Preset:
        pixels = 4 * patch if tiny else side
        config = _tower("siglip", size, patch=patch, vocabulary=vocabulary, tiny=tiny, image_size=pixels)
        processor = {
            "image_processor_type": "SiglipImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "size": {"height": pixels, "width": pixels},
            "resample": 3,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        source = "big_vision model names and sizes (So400m: Alabdulmohsin et al. 2023, arXiv:2305.13035, table 1)"
        assumed = ("vision_config.hidden_act", "vision_config.layer_norm_eps", "processor.resample")
        return preset(name, config, processor, f"google/{checkpoint}", source, assumed, tiny)

    return build


def _naflex(checkpoint: str, size: str) -> Build:
    """Images of any shape in up to 256 patches of 16 pixels; the tiny one has a table of 4 x 4 positions."""

    def build(name: str, *, tiny: bool) -> Preset:
        config = _tower("siglip2", size, patch=16, vocabulary=256000, tiny=tiny, num_patches=16 if tiny else 256)
        processor = {
            "image_processor_type": "Siglip2ImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "patch_size": 16,
            "max_num_patches": 64 if tiny else 256,
            "resample": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        source = (
            "convert_siglip2_to_hf.py of transformers (patch, positions, processor); big_vision model names and sizes"
        )
        assumed = ("vision_config.hidden_act", "vision_config.layer_norm_eps", "processor.resample")
        return preset(name, config, processor, f"google/{checkpoint}", source, assumed, tiny)

    return build


_BASE = _fixed("siglip-base-patch16-224", "base", side=224, patch=16)
_NAFLEX = _naflex("siglip2-so400m-patch16-naflex", "so400m")

PRESETS: dict[str, Build] = {
    "siglip-base-224": _BASE,
    "siglip-base-224-vision": tower_alone(_BASE, "SiglipVisionModel"),
    "siglip-so400m-384": _fixed("siglip-so400m-patch14-384", "so400m", side=384, patch=14),
    "siglip2-so400m-384": _fixed("siglip2-so400m-patch14-384", "so400m", side=384, patch=14, vocabulary=256000),
    "siglip2-so400m-naflex": _NAFLEX,
    "siglip2-so400m-naflex-vision": tower_alone(_NAFLEX, "Siglip2VisionModel"),
}
