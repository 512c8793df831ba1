"""Qwen2-Audio, as published by Qwen."""

from onereplay.presets.base import AUDIO, Build, Preset, preset, stand_in


def _qwen2_audio(size: str) -> Build:
    """Whisper large-v3's encoder in front of a language model; the tiny window has 32 frames and 8 tokens."""

    def build(name: str, *, tiny: bool) -> Preset:
        audio = {
            "model_type": "qwen2_audio_encoder",
            "d_model": 64 if tiny else 1280,
            "encoder_layers": 2 if tiny else 32,
            "encoder_attention_heads": 4 if tiny else 20,
            "encoder_ffn_dim": 256 if tiny else 5120,
            "num_mel_bins": 8 if tiny else 128,
            "max_source_positions": 16 if tiny else 1500,
            "encoder_layerdrop": 0.0,
            "activation_function": "gelu",
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "scale_embedding": False,
        }
        hidden = 32 if tiny else 4096
        text = stand_in("qwen2", hidden, heads=2 if tiny else 32, layers=1)
        config = {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": "qwen2_audio",
            "dtype": "float32" if tiny else "bfloat16",
            "audio_token_index": AUDIO,
            "audio_config": audio,
            "text_config": text,
        }
        processor = {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 8 if tiny else 128,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
        }
        source = "Qwen2AudioConfig of transformers, whose values for the encoder are written for this checkpoint"
        return preset(name, config, processor, f"Qwen/Qwen2-Audio-{size}", source, ("text_config.hidden_size",), tiny)

    return build


PRESETS: dict[str, Build] = {"qwen2_audio-7b": _qwen2_audio("7B")}
