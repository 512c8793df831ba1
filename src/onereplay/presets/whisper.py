"""Whisper, as published by OpenAI."""

from onereplay.presets.base import BOS, EOS, PAD, VOCABULARY, Build, Preset, preset


def _whisper(size: str, *, width: int, layers: int, heads: int, bands: int) -> Build:
    """Windows of 3,000 frames; the tiny one has 32. The decoder is a stand-in of one layer."""

    def build(name: str, *, tiny: bool) -> Preset:
        positions = 16 if tiny else 1500
        config = {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "dtype": "float32" if tiny else "float16",
            "d_model": 64 if tiny else width,
            "encoder_layers": 2 if tiny else layers,
            "encoder_attention_heads": 4 if tiny else heads,
            "encoder_ffn_dim": 256 if tiny else 4 * width,
            "num_mel_bins": 8 if tiny else bands,
            "max_source_positions": positions,
            "activation_function": "gelu",
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "scale_embedding": False,
            "decoder_layers": 1,
            "decoder_attention_heads": 4 if tiny else heads,
            "decoder_ffn_dim": 64,
            "max_target_positions": 64,
            "vocab_size": VOCABULARY,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "decoder_start_token_id": BOS,
            "begin_suppress_tokens": None,
        }
        processor = {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 8 if tiny else bands,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
        }
        source = f"ModelDimensions of {size} in openai/whisper; whisper/audio.py there for the spectrogram"
        return preset(name, config, processor, f"openai/whisper-{size}", source, (), tiny)

    return build


PRESETS: dict[str, Build] = {
    "whisper-small": _whisper("small", width=768, layers=12, heads=12, bands=80),
    "whisper-large-v3": _whisper("large-v3", width=1280, layers=32, heads=20, bands=128),
}
