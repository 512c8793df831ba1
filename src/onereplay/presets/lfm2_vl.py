"""LFM2-VL, as published by Liquid AI."""

from collections.abc import Mapping

from onereplay.presets.base import Build, Preset, preset, stand_in, whole

_LFM2_VL_450M_SOURCE = "config.json, preprocessor_config.json and processor_config.json of the checkpoint"
_LFM2_VL_1_6B_SOURCE = "as LFM2-VL-450M, with the sizes of SigLIP 2 so400m/16 NaFlex"


def _lfm2_vl(
    size: str, *, vision_sizes: Mapping[str, int], text_hidden: int, source: str, assumed: tuple[str, ...]
) -> Build:
    """SigLIP 2 NaFlex: a picture keeps its shape within 256 tokens, or is split into tiles of 512x512 pixels."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        vision = {
            "model_type": "siglip2_vision_model",
            **(small if tiny else vision_sizes),
            "num_patches": 256,
            "patch_size": 16,
            "num_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "vision_use_head": False,
        }
        text = {
            **stand_in("lfm2", hidden, heads=hidden // 16 if tiny else hidden // 64, layers=2),
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "conv_bias": False,
            "norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        }
        config = {
            **whole("lfm2_vl", "Lfm2VlForConditionalGeneration", vision, text, tiny),
            "downsample_factor": 2,
            "projector_hidden_size": 96 if tiny else 2560,
            "projector_hidden_act": "gelu",
            "projector_bias": True,
            "projector_use_layernorm": True,
        }
        tile = 128 if tiny else 512
        processor = {
            "image_processor_type": "Lfm2VlImageProcessor",
            "size": {"height": tile, "width": tile},
            "tile_size": tile,
            "encoder_patch_size": 16,
            "downsample_factor": 2,
            "min_image_tokens": 4 if tiny else 64,
            "max_image_tokens": 16 if tiny else 256,
            "max_pixels_tolerance": 2.0,
            "do_image_splitting": True,
            "min_tiles": 2,
            "max_tiles": 10,
            "use_thumbnail": False,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
        }
        return preset(name, config, processor, f"LiquidAI/LFM2-VL-{size}", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "lfm2_vl-450m": _lfm2_vl(
        "450M",
        vision_sizes={
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
        },
        text_hidden=1024,
        source=_LFM2_VL_450M_SOURCE,
        assumed=("projector_use_layernorm",),
    ),
    "lfm2_vl-1.6b": _lfm2_vl(
        "1.6B",
        vision_sizes={
            "hidden_size": 1152,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 4304,
        },
        text_hidden=2048,
        source=_LFM2_VL_1_6B_SOURCE,
        assumed=(
            "vision_config.hidden_size",
            "vision_config.num_hidden_layers",
            "vision_config.num_attention_heads",
            "vision_config.intermediate_size",
            "text_config.hidden_size",
            "projector_hidden_size",
            "projector_use_layernorm",
            "processor.use_thumbnail",
        ),
    ),
}
