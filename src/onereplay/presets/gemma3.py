"""Gemma 3, as published by Google."""

from onereplay.presets.base import Build, Preset, preset, stand_in, whole


def _gemma3(size: str, *, text_hidden: int) -> Build:
    """SigLIP so400m on squares of 896 pixels, pooled to 256 tokens; the tiny square has 56 pixels and 4 tokens."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        side = 56 if tiny else 896
        vision = {
            "model_type": "siglip_vision_model",
            "hidden_size": 64 if tiny else 1152,
            "num_hidden_layers": 2 if tiny else 27,
            "num_attention_heads": 4 if tiny else 16,
            "intermediate_size": 128 if tiny else 4304,
            "image_size": side,
            "patch_size": 14,
            "num_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "vision_use_head": False,
        }
        text = {
            **stand_in("gemma3_text", hidden, heads=2, layers=1),
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 16,
            "sliding_window": 1024,
            "layer_types": ["full_attention"],
        }
        config = {
            **whole("gemma3", "Gemma3ForConditionalGeneration", vision, text, tiny),
            "mm_tokens_per_image": 4 if tiny else 256,
        }
        processor = {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": side, "width": side},
            "do_pan_and_scan": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
        }
        source = (
            "vision_config in convert_gemma3_weights_orbax_to_hf.py of transformers; preprocessor_config.json of the "
            "checkpoint as copied in public repositories"
        )
        assumed = ("text_config.hidden_size", "vision_config.layer_norm_eps", "vision_config.hidden_act")
        return preset(name, config, processor, f"google/gemma-3-{size}-it", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "gemma3-4b": _gemma3("4b", text_hidden=2560),
    "gemma3-12b": _gemma3("12b", text_hidden=3840),
    "gemma3-27b": _gemma3("27b", text_hidden=5376),
}
