"""Llama 4, as published by Meta."""

from onereplay.presets.base import Build, Preset, preset, stand_in, whole


def _llama4(checkpoint: str) -> Build:
    """A tower of 34 layers on squares of 336 pixels, 144 tokens; the tiny square has 56 pixels and 4 tokens."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else 5120
        side = 56 if tiny else 336
        vision = {
            "model_type": "llama4_vision_model",
            "hidden_size": 64 if tiny else 1408,
            "num_hidden_layers": 2 if tiny else 34,
            "num_attention_heads": 4 if tiny else 16,
            "intermediate_size": 256 if tiny else 5632,
            "vision_output_dim": 48 if tiny else 4096,
            "projector_input_dim": 48 if tiny else 4096,
            "projector_output_dim": 48 if tiny else 4096,
            "projector_dropout": 0.0,
            "multi_modal_projector_bias": False,
            "pixel_shuffle_ratio": 0.5,
            "image_size": side,
            "patch_size": 14,
            "num_channels": 3,
            "hidden_act": "gelu",
            "norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "vision_feature_select_strategy": "default",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
        text = {
            **stand_in("llama4_text", hidden, heads=2 if tiny else 40, layers=1),
            "head_dim": 16 if tiny else 128,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-5,
            "no_rope_layers": [1],
            "layer_types": ["chunked_attention"],
            "attention_chunk_size": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        }
        config = whole("llama4", "Llama4ForConditionalGeneration", vision, text, tiny)
        processor = {
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": side, "width": side},
            "max_patches": 16,
            "resize_to_max_canvas": False,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
        }
        source = (
            "config.json of the checkpoint (rope_theta written as rope_parameters) and max_patches and "
            "resize_to_max_canvas of its preprocessor_config.json, as copied in public repositories"
        )
        assumed = ("processor.image_mean", "processor.image_std", "processor.resample")
        return preset(name, config, processor, f"meta-llama/{checkpoint}", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "llama4-scout": _llama4("Llama-4-Scout-17B-16E-Instruct"),
    "llama4-maverick": _llama4("Llama-4-Maverick-17B-128E-Instruct"),
}
