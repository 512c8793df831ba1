"""Idefics3 and SmolVLM, as published by Hugging Face."""

from typing import NamedTuple

from onereplay.presets.base import Build, Preset, preset, stand_in, whole


class _Tower(NamedTuple):
    """Sizes of a SigLIP tower, and how its tiles are merged."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    side: int
    patch: int
    scale: int


_SO400M_364 = _Tower(1152, 27, 16, 4304, 364, 14, 2)
_SO400M_384 = _Tower(1152, 27, 16, 4304, 384, 14, 3)
_BASE_512 = _Tower(768, 12, 12, 3072, 512, 16, 4)
_TINY = {
    _SO400M_364: _Tower(64, 2, 4, 128, 56, 14, 2),
    _SO400M_384: _Tower(64, 2, 4, 128, 86, 14, 3),
    _BASE_512: _Tower(64, 2, 4, 128, 128, 16, 4),
}
"""4 tokens a tile. A side of 384 is no whole number of patches of 14, and neither is 86."""


def _idefics3(
    checkpoint: str, model_type: str, tower: _Tower, *, text_hidden: int, source: str, assumed: tuple[str, ...]
) -> Build:
    """SigLIP on square tiles, several to an image."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        size = _TINY[tower] if tiny else tower
        smol = model_type == "smolvlm"
        vision = {
            "model_type": f"{model_type}_vision",
            "hidden_size": size.hidden,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "intermediate_size": size.intermediate,
            "image_size": size.side,
            "patch_size": size.patch,
            "num_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
        }
        text = {
            **stand_in("llama", hidden, heads=hidden // 16 if tiny else hidden // 64, layers=1),
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        }
        architecture = f"{'SmolVLM' if smol else 'Idefics3'}ForConditionalGeneration"
        config = {
            **whole(model_type, architecture, vision, text, tiny),
            "scale_factor": size.scale,
        }
        processor = {
            "image_processor_type": f"{'SmolVLM' if smol else 'Idefics3'}ImageProcessor",
            "size": {"longest_edge": 4 * size.side},
            "max_image_size": {"longest_edge": size.side},
            "do_image_splitting": True,
            "do_pad": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 1,
        }
        return preset(name, config, processor, checkpoint, source, assumed, tiny)

    return build


_COPIED = "config.json and preprocessor_config.json of the checkpoint, as copied in public repositories"
_SMOL_ASSUMED = ("vision_config.num_hidden_layers", "vision_config.intermediate_size")
"""The checkpoint leaves them to class defaults, which are those of SigLIP base."""
_SO400M_ASSUMED = (
    "text_config.hidden_size",
    "vision_config.hidden_size",
    "vision_config.num_hidden_layers",
    "vision_config.num_attention_heads",
    "vision_config.intermediate_size",
)

PRESETS: dict[str, Build] = {
    "idefics3-8b": _idefics3(
        "HuggingFaceM4/Idefics3-8B-Llama3",
        "idefics3",
        _SO400M_364,
        text_hidden=4096,
        source="the processor's class defaults in transformers, which are the checkpoint's, and SigLIP so400m",
        assumed=(*_SO400M_ASSUMED, "vision_config.image_size", "vision_config.patch_size", "scale_factor"),
    ),
    "smolvlm-2.2b": _idefics3(
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        "smolvlm",
        _SO400M_384,
        text_hidden=2048,
        source="model card (SigLIP so400m at 384 pixels, 81 tokens a tile) and SigLIP so400m",
        assumed=(*_SO400M_ASSUMED, "vision_config.image_size", "scale_factor", "processor.size"),
    ),
    "smolvlm-500m": _idefics3(
        "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        "smolvlm",
        _BASE_512,
        text_hidden=960,
        source=_COPIED,
        assumed=_SMOL_ASSUMED,
    ),
    "smolvlm-256m": _idefics3(
        "HuggingFaceTB/SmolVLM2-256M-Video-Instruct",
        "smolvlm",
        _BASE_512,
        text_hidden=576,
        source=f"{_COPIED} (those of SmolVLM-256M-Instruct)",
        assumed=_SMOL_ASSUMED,
    ),
}
