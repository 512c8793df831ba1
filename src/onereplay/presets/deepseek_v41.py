"""DeepSeek-V4.1, as published by DeepSeek."""

from onereplay.presets.base import Build, Preset, preset


def _deepseek_v41(size: str, *, text_hidden: int) -> Build:
    """A ViT for grids of any size, 3x3 patches a token."""

    def build(name: str, *, tiny: bool) -> Preset:
        config = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "float32" if tiny else "bfloat16",
            "image_token_id": 62 if tiny else 129264,
            "text_config": {"hidden_size": 32 if tiny else text_hidden},
            "vision_config": {
                "model_type": "deepseek_v41_vision",
                "num_hidden_layers": 2 if tiny else 32,
                "hidden_size": 64 if tiny else 1024,
                "num_attention_heads": 4 if tiny else 16,
                "intermediate_size": 88 if tiny else 2816,
                "patch_size": 14,
                "rope_theta": 10000,
                "downsample_ratio": 3,
                "max_image_tokens": 1024,
                "min_pixels": 7056 if tiny else 295936,
                "max_wh_ratio": None,
            },
        }
        source = "config.json of the checkpoint, revision dba1be0a40aa45a94ad051997016db3960a90277, as quoted publicly"
        return preset(name, config, {}, f"deepseek-ai/DeepSeek-V4.1-{size}", source, (), tiny)

    return build


PRESETS: dict[str, Build] = {"deepseek_v41-flash": _deepseek_v41("Flash", text_hidden=5120)}
