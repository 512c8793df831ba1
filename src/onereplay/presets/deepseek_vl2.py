"""DeepSeek-VL2, as published by DeepSeek."""

from onereplay.presets.base import Build, Preset, preset

_RESOLUTIONS = [
    [384 * across, 384 * down]
    for across, down in (
        *((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1), (1, 5), (5, 1), (1, 6), (2, 3), (3, 2)),
        *((6, 1), (1, 7), (7, 1), (1, 8), (2, 4), (4, 2), (8, 1), (1, 9), (3, 3), (9, 1)),
    )
]
"""Every arrangement of up to nine tiles."""


def _deepseek_vl2(size: str, *, n_embed: int) -> Build:
    """SigLIP so400m on tiles of 384 pixels, 196 tokens a tile; a tiny tile has 48 pixels and 4 tokens.

    Both leave pixels at the border that fill no patch (384 = 27 * 14 + 6), and patches that fill no square of four.
    """

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else n_embed
        side = 48 if tiny else 384
        resolutions = [[width * side // 384, height * side // 384] for width, height in _RESOLUTIONS]
        config = {
            "architectures": ["DeepseekVLV2ForCausalLM"],
            "model_type": "deepseek_vl_v2",
            "dtype": "float32" if tiny else "bfloat16",
            "candidate_resolutions": resolutions,
            "global_view_pos": "head",
            "tile_tag": "2D",
            "vision_config": {
                "model_type": "vision",
                "model_name": "siglip_so400m_patch14_384",
                "image_size": side,
                "patch_size": 14,
                "width": 64 if tiny else 1152,
                "layers": 2 if tiny else 27,
                "heads": 4 if tiny else 16,
                "mlp_ratio": 3.75 if tiny else 3.7362,
            },
            "projector_config": {
                "model_type": "mlp_projector",
                "projector_type": "downsample_mlp_gelu",
                "input_dim": 64 if tiny else 1152,
                "n_embed": hidden,
                "depth": 2,
                "mlp_ratio": 1,
                "downsample_ratio": 2,
                "token_pooling": False,
            },
            "language_config": {"hidden_size": hidden},
        }
        processor = {
            "candidate_resolutions": resolutions,
            "patch_size": 14,
            "downsample_ratio": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        source = (
            "modeling_deepseek_vl_v2.py, siglip_vit.py and processing_deepseek_vl_v2.py in deepseek-ai/DeepSeek-VL2; "
            "the candidate resolutions are those that the technical report (arXiv:2412.10302) describes"
        )
        assumed = (
            "projector_config.n_embed",
            "candidate_resolutions",
            "processor.candidate_resolutions",
        )
        return preset(name, config, processor, f"deepseek-ai/{size}", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "deepseek_vl2-tiny": _deepseek_vl2("deepseek-vl2-tiny", n_embed=1280),
    "deepseek_vl2-small": _deepseek_vl2("deepseek-vl2-small", n_embed=2048),
    "deepseek_vl2": _deepseek_vl2("deepseek-vl2", n_embed=2560),
}
