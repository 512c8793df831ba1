"""Qwen2.5-Omni's thinker, as published by Qwen."""

from onereplay.presets.base import (
    AUDIO,
    CLIP_MEAN,
    CLIP_STD,
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    Build,
    Preset,
    preset,
    stand_in,
)

AUDIO_START, AUDIO_END = 57, 58


def _qwen2_5_omni(size: str, *, text_hidden: int, assumed: tuple[str, ...]) -> Build:
    """Whisper large-v3's encoder over chunks of two seconds, and Qwen2.5-VL's vision tower, in front of one language
    model; a tiny chunk has 16 frames, 8 rows and 4 tokens."""

    def build(name: str, *, tiny: bool) -> Preset:
        hidden = 32 if tiny else text_hidden
        audio = {
            "model_type": "qwen2_5_omni_audio_encoder",
            "d_model": 64 if tiny else 1280,
            "encoder_layers": 2 if tiny else 32,
            "encoder_attention_heads": 4 if tiny else 20,
            "encoder_ffn_dim": 256 if tiny else 5120,
            "num_mel_bins": 8 if tiny else 128,
            "max_source_positions": 16 if tiny else 1500,
            "n_window": 8 if tiny else 100,
            "output_dim": hidden,
            "activation_function": "gelu",
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "scale_embedding": False,
        }
        vision = {
            "model_type": "qwen2_5_omni_vision_encoder",
            "depth": 4 if tiny else 32,
            "hidden_size": 64 if tiny else 1280,
            # 3,420 is not a multiple of 8: the small size is not either.
            "intermediate_size": 64 + 3420 % 128 if tiny else 3420,
            "num_heads": 4 if tiny else 16,
            "out_hidden_size": hidden,
            "fullatt_block_indexes": [1, 3] if tiny else [7, 15, 23, 31],
            "window_size": 112,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
            "hidden_act": "silu",
        }
        text = {
            **stand_in("qwen2_5_omni_text", hidden, heads=2 if tiny else hidden // 128, layers=1),
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [2, 3, 3] if tiny else [16, 24, 24],
            },
        }
        config = {
            "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
            "model_type": "qwen2_5_omni_thinker",
            "dtype": "float32" if tiny else "bfloat16",
            "tie_word_embeddings": False,
            "audio_token_index": AUDIO,
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "audio_start_token_id": AUDIO_START,
            "audio_end_token_id": AUDIO_END,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "position_id_per_seconds": 25,
            "seconds_per_chunk": 2,
            "audio_config": audio,
            "vision_config": vision,
            "text_config": text,
        }
        processor = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": CLIP_MEAN,
            "image_std": CLIP_STD,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 8 if tiny else 128,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 300,
        }
        source = (
            "Qwen2_5OmniThinkerConfig of transformers, whose values for the encoders are written for the 7B; the "
            "technical report, which takes the vision tower from Qwen2.5-VL"
        )
        return preset(name, config, processor, f"Qwen/Qwen2.5-Omni-{size}", source, assumed, tiny)

    return build


_ASSUMED = ("vision_config.hidden_size", "processor.min_pixels", "processor.max_pixels", "processor.chunk_length")
PRESETS: dict[str, Build] = {
    "qwen2_5_omni-3b": _qwen2_5_omni(
        "3B",
        text_hidden=2048,
        assumed=("audio_config.output_dim", "vision_config.out_hidden_size", "text_config.hidden_size", *_ASSUMED),
    ),
    "qwen2_5_omni-7b": _qwen2_5_omni("7B", text_hidden=3584, assumed=_ASSUMED),
}
