"""Mistral Small 3.1, as published by Mistral AI."""

from onereplay.presets.base import IMAGE, Build, Preset, preset, whole
from onereplay.presets.pixtral import mistral_text, pixtral_processor, pixtral_vision


def _mistral3() -> Build:
    """The Pixtral tower with patches of 14 pixels on images of up to 1,540, merged 2x2."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else 5120
        vision = pixtral_vision(14, 1540, tiny)
        config = {
            **whole("mistral3", "Mistral3ForConditionalGeneration", vision, mistral_text(hidden, tiny), tiny),
            "image_token_index": IMAGE,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": False,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        }
        checkpoint = "mistralai/Mistral-Small-3.1-24B-Instruct-2503"
        source = "config.json and preprocessor_config.json of the checkpoint"
        return preset(name, config, pixtral_processor(14, 1540), checkpoint, source, (), tiny)

    return build


PRESETS: dict[str, Build] = {"mistral3-24b": _mistral3()}
