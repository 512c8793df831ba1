"""MiniCPM-V 4.6, as published by OpenBMB."""

from onereplay.presets.base import VIDEO, Build, Preset, preset, stand_in, whole


def _minicpmv4_6() -> Build:
    """SigLIP so400m/14 on slices of about 448x448 pixels, 64 tokens each; a table of 70x70 positions."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else 1024
        insert = 1 if tiny else 6
        vision = {
            "model_type": "minicpmv4_6_vision",
            "hidden_size": 64 if tiny else 1152,
            "num_hidden_layers": 4 if tiny else 27,
            "num_attention_heads": 4 if tiny else 16,
            "intermediate_size": 144 if tiny else 4304,
            "num_channels": 3,
            "image_size": 980,
            "patch_size": 14,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "insert_layer_id": insert,
            "window_kernel_size": [2, 2],
        }
        text = {
            **stand_in("qwen3", hidden, heads=hidden // 16 if tiny else hidden // 64, layers=1),
            "head_dim": 16 if tiny else 64,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        }
        config = {
            **whole("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", vision, text, tiny),
            "video_token_id": VIDEO,
            "image_size": 1120,
            "drop_vision_last_layer": False,
            "insert_layer_id": insert,
            "downsample_mode": "16x",
            "merge_kernel_size": [2, 2],
            "merger_times": 1,
        }
        processor = {
            "image_processor_type": "MiniCPMV4_6ImageProcessor",
            "max_slice_nums": 9,
            "scale_resolution": 112 if tiny else 448,
            "patch_size": 14,
            "slice_mode": True,
            "use_image_id": True,
            "downsample_mode": "16x",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 3,
        }
        assumed = (
            "insert_layer_id",
            "vision_config.insert_layer_id",
            "vision_config.window_kernel_size",
            "downsample_mode",
            "merge_kernel_size",
            "merger_times",
            "processor.downsample_mode",
            "processor.resample",
        )
        source = "config.json and preprocessor_config.json of the checkpoint, which leaves the merges to the defaults"
        return preset(name, config, processor, "openbmb/MiniCPM-V-4.6", source, assumed, tiny)

    return build


PRESETS: dict[str, Build] = {"minicpmv4_6": _minicpmv4_6()}
