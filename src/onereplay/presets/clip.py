"""CLIP, as published by OpenAI."""

from onereplay.presets.base import CLIP_MEAN, CLIP_STD, Build, Preset, preset, tower_alone


def _clip(
    checkpoint: str, *, hidden: int, layers: int, heads: int, side: int, patch: int, projection: int, text_hidden: int
) -> Build:
    """Square images of one size and a class token; the tiny one has 4 x 4 patches."""

    def build(name: str, *, tiny: bool) -> Preset:
        width = 64 if tiny else hidden
        shared = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "attention_dropout": 0.0}
        vision = {
            "model_type": "clip_vision_model",
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "projection_dim": 32 if tiny else projection,
            "num_hidden_layers": 2 if tiny else layers,
            "num_attention_heads": 4 if tiny else heads,
            "num_channels": 3,
            "image_size": 4 * patch if tiny else side,
            "patch_size": patch,
            **shared,
        }
        text = {
            "model_type": "clip_text_model",
            "hidden_size": 32 if tiny else text_hidden,
            "intermediate_size": 128 if tiny else 4 * text_hidden,
            "projection_dim": 32 if tiny else projection,
            "num_hidden_layers": 1,
            "num_attention_heads": 4 if tiny else text_hidden // 64,
            "vocab_size": 64 if tiny else 49408,
            "max_position_embeddings": 77,
            **shared,
        }
        config = {
            "architectures": ["CLIPModel"],
            "model_type": "clip",
            "dtype": "float32",
            "projection_dim": 32 if tiny else projection,
            "text_config": text,
            "vision_config": vision,
        }
        pixels = vision["image_size"]
        processor = {
            "image_processor_type": "CLIPImageProcessor",
            "do_resize": True,
            "do_center_crop": True,
            "do_convert_rgb": True,
            "size": {"shortest_edge": pixels},
            "crop_size": {"height": pixels, "width": pixels},
            "resample": 3,
            "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD,
        }
        source = (
            "Radford et al. 2021 (arXiv:2103.00020), tables 19 and 20; clip/clip.py of openai/CLIP for the processor"
        )
        assumed = ("vision_config.layer_norm_eps",)
        return preset(name, config, processor, f"openai/{checkpoint}", source, assumed, tiny)

    return build


_B_32 = _clip(
    "clip-vit-base-patch32", hidden=768, layers=12, heads=12, side=224, patch=32, projection=512, text_hidden=512
)

PRESETS: dict[str, Build] = {
    "clip-b-32": _B_32,
    "clip-b-32-vision": tower_alone(_B_32, "CLIPVisionModel"),
    "clip-l-14-336": _clip(
        "clip-vit-large-patch14-336",
        hidden=1024,
        layers=24,
        heads=16,
        side=336,
        patch=14,
        projection=768,
        text_hidden=768,
    ),
}
