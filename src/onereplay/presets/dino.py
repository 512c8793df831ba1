"""DINOv2 and DINOv3, as published by Meta."""

from onereplay.presets.base import IMAGENET_MEAN, IMAGENET_STD, Build, Preset, preset


def _dinov2(size: str, *, hidden: int, layers: int, heads: int, swiglu: bool = False) -> Build:
    """A position table of 37 x 37 and images of 224 pixels; the tiny table is 4 x 4."""

    def build(name: str, *, tiny: bool) -> Preset:
        side = 56 if tiny else 518
        config = {
            "architectures": ["Dinov2Model"],
            "model_type": "dinov2",
            "dtype": "float32",
            "hidden_size": 64 if tiny else hidden,
            "num_hidden_layers": 2 if tiny else layers,
            "num_attention_heads": 4 if tiny else heads,
            "mlp_ratio": 4,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "layer_norm_eps": 1e-6,
            "image_size": side,
            "patch_size": 14,
            "num_channels": 3,
            "qkv_bias": True,
            "layerscale_value": 1.0,
            "drop_path_rate": 0.0,
            "use_swiglu_ffn": swiglu,
            "use_mask_token": True,
        }
        crop = 56 if tiny else 224
        processor = {
            "image_processor_type": "BitImageProcessor",
            "do_resize": True,
            "do_center_crop": True,
            "do_convert_rgb": True,
            "size": {"shortest_edge": 64 if tiny else 256},
            "crop_size": {"height": crop, "width": crop},
            "resample": 3,
            "image_mean": IMAGENET_MEAN,
            "image_std": IMAGENET_STD,
        }
        source = "convert_dinov2_to_hf.py of transformers; hubconf and vision_transformer.py of facebookresearch/dinov2"
        assumed = ("processor.crop_size",)
        return preset(name, config, processor, f"facebook/dinov2-{size}", source, assumed, tiny)

    return build


def _dinov3(size: str, *, hidden: int, intermediate: int, layers: int, heads: int) -> Build:
    """Rotary positions, four registers, images of 224 pixels; the tiny image has 64."""

    def build(name: str, *, tiny: bool) -> Preset:
        side = 64 if tiny else 224
        config = {
            "architectures": ["DINOv3ViTModel"],
            "model_type": "dinov3_vit",
            "dtype": "float32",
            "hidden_size": 64 if tiny else hidden,
            "intermediate_size": 128 if tiny else intermediate,
            "num_hidden_layers": 2 if tiny else layers,
            "num_attention_heads": 4 if tiny else heads,
            "hidden_act": "gelu",
            "attention_dropout": 0.0,
            "layer_norm_eps": 1e-5,
            "rope_theta": 100.0,
            "image_size": side,
            "patch_size": 16,
            "num_channels": 3,
            "query_bias": True,
            "key_bias": False,
            "value_bias": True,
            "proj_bias": True,
            "mlp_bias": True,
            "layerscale_value": 1.0,
            "drop_path_rate": 0.0,
            "use_gated_mlp": False,
            "num_register_tokens": 4,
        }
        processor = {
            "image_processor_type": "DINOv3ViTImageProcessor",
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "size": {"height": side, "width": side},
            "resample": 2,
            "image_mean": IMAGENET_MEAN,
            "image_std": IMAGENET_STD,
        }
        source = "convert_dinov3_vit_to_hf.py of transformers"
        assumed = ("image_size", "mlp_bias")
        checkpoint = f"facebook/dinov3-{size}-pretrain-lvd1689m"
        return preset(name, config, processor, checkpoint, source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "dinov2-base": _dinov2("base", hidden=768, layers=12, heads=12),
    "dinov2-large": _dinov2("large", hidden=1024, layers=24, heads=16),
    "dinov2-giant": _dinov2("giant", hidden=1536, layers=40, heads=24, swiglu=True),
    "dinov3-vitl16": _dinov3("vitl16", hidden=1024, intermediate=4096, layers=24, heads=16),
}
