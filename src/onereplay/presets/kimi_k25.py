"""Kimi-K2.5 and K2.6, as published by Moonshot AI."""

from onereplay.presets.base import VIDEO, VISION_END, VISION_START, Build, Preset, preset, stand_in, whole


def _kimi_k25(version: str, *, assumed: tuple[str, ...]) -> Build:
    """MoonViT for clips of up to four frames; the tiny table of positions is as wide as small images and narrower than
    large ones, so that it is both shrunk and stretched."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else 7168
        width = 64 if tiny else 1152
        vision = {
            "model_type": "kimi_k25_vision",
            "num_hidden_layers": 3 if tiny else 27,
            "hidden_size": width,
            "intermediate_size": 144 if tiny else 4304,
            "num_attention_heads": 4 if tiny else 16,
            "patch_size": 14,
            "pos_emb_height": 8 if tiny else 64,
            "pos_emb_width": 8 if tiny else 64,
            "pos_emb_time": 4,
            "merge_kernel_size": [2, 2],
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        }
        text = {
            **stand_in("deepseek_v3", hidden, heads=2 if tiny else 64, layers=1),
            "moe_intermediate_size": 32,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        }
        config = {
            **whole("kimi_k25", "Kimi_K25ForConditionalGeneration", vision, text, tiny),
            "projection_hidden_size": width,
            "projection_layer_norm_eps": 1e-5,
            "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
        }
        processor = {
            "image_processor_type": "Kimi_K25ImageProcessor",
            "size": {"max_height": 512, "max_width": 512},
            "max_patches": 64 if tiny else 16384,
            "patch_size": 14,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 3,
        }
        source = "config.json and preprocessor_config.json of the checkpoint, as quoted publicly; names of transformers"
        return preset(name, config, processor, f"moonshotai/Kimi-{version}", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {
    "kimi_k25": _kimi_k25(
        "K2.5", assumed=("vision_config.hidden_act", "vision_config.rope_parameters", "processor.resample")
    ),
}
