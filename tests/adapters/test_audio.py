"""Encoders of sound: Whisper and Qwen2-Audio.

Tolerance: the fp32 rule of `onereplay.checking`, 1e-5 of the largest reference value.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2AudioForConditionalGeneration, WhisperForConditionalGeneration

from onereplay import Encoder, EncoderCudaGraphConfig, accelerate
from onereplay.adapters import adapter_for
from onereplay.adapters.qwen2_audio import Qwen2Audio
from onereplay.checking import FP32_TOLERANCE
from onereplay.core.plan import Replay
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.loading import random_weights_
from onereplay.presets import get_preset, hf_config

CONFIG = EncoderCudaGraphConfig(token_budgets=(64,))
CLASSES = {
    "whisper-small@tiny": WhisperForConditionalGeneration,
    "qwen2_audio-7b@tiny": Qwen2AudioForConditionalGeneration,
}
BANDS, FRAMES = 8, 32
"""Of the tiny presets."""


def whole(name: str) -> Any:
    model = CLASSES[name](hf_config(get_preset(name))).eval()
    random_weights_(model, tuple(part for part, _ in model.named_children()))
    return model


def sound(number: int, seed: int = 0) -> Tensor:
    return torch.randn(number, BANDS, FRAMES, generator=torch.Generator().manual_seed(seed))


def masks(*lengths: int) -> Tensor:
    return (torch.arange(FRAMES) < torch.tensor(lengths)[:, None]).long()


def close(found: Tensor, expected: Tensor) -> bool:
    largest = expected.abs().max().clamp(min=1)
    return found.shape == expected.shape and bool((found - expected).abs().max() <= FP32_TOLERANCE * largest)


def test_whisper_windows_group_into_recordings() -> None:
    model = whole("whisper-small@tiny")
    with Encoder(model, CONFIG) as encoder, torch.no_grad():
        found = encoder.encode_inputs(input_features=sound(4), num_windows=[1, 3])
        assert [rows.shape for rows in found] == [(16, 64), (48, 64)]
        assert close(torch.cat(found), model.model.encoder(sound(4)).last_hidden_state.flatten(0, 1))
        assert encoder.report().replays == {"audio": {64: 1}}


def test_whisper_generates_the_same_tokens_with_its_encoder_replayed() -> None:
    stock, model = whole("whisper-small@tiny"), whole("whisper-small@tiny")
    start = torch.tensor([[1, 5]] * 3)
    with accelerate(model, CONFIG) as handle:
        found, expected = (
            each.generate(sound(3), decoder_input_ids=start, max_new_tokens=6, do_sample=False)
            for each in (model, stock)
        )
        assert torch.equal(found, expected)
        assert handle.report().replays == {"audio": {64: 1}}
        with torch.no_grad():
            assert close(
                model(sound(2), decoder_input_ids=start[:2]).logits, stock(sound(2), decoder_input_ids=start[:2]).logits
            )
    assert "forward" not in vars(model.model.encoder)


@pytest.mark.parametrize("shape", [(1, BANDS, FRAMES - 1), (1, BANDS + 1, FRAMES), (BANDS, FRAMES)])
def test_windows_of_another_shape_are_refused_as_by_the_stock_encoder(shape: tuple[int, ...]) -> None:
    with Encoder(whole("whisper-small@tiny"), CONFIG) as encoder, pytest.raises(InputError, match="whisper takes"):
        encoder.encode_inputs(input_features=torch.zeros(shape))


@pytest.mark.parametrize("name", CLASSES)
def test_a_file_of_audio_is_refused_with_what_to_do(name: str) -> None:
    with Encoder.from_preset(name, config=CONFIG) as encoder:
        with pytest.raises(InputError, match=r"files of audio are not read here.*encode_inputs"):
            encoder.encode(["speech.wav"])
        (error,) = encoder.encode([b"RIFF"], on_error="return")
        assert isinstance(error, InputError)


def test_qwen2_audio_rows_follow_the_published_formula() -> None:
    adapter = Qwen2Audio(hf_config(get_preset("qwen2_audio-7b")))
    for frames in range(3, 3001):
        assert adapter.rows_heard(frames) == ((frames - 1) // 2 + 1 - 2) // 2 + 1
    assert adapter.rows_heard(3000) == adapter.window_tokens == 750


def test_qwen2_audio_gives_what_its_language_model_reads() -> None:
    """The stock model puts the features where the placeholders are; a hook on the language model sees them there."""
    model = whole("qwen2_audio-7b@tiny")
    lengths, placeholder = (32, 13, 20), model.config.audio_token_index
    with Encoder(model, CONFIG) as encoder:
        batch = encoder.adapter.batch(input_features=sound(3), feature_attention_mask=masks(*lengths))
        found = encoder.manager.encode(batch)
        assert isinstance(encoder.manager.plan(batch).steps["audio"], Replay)
    assert [len(rows) for rows in found] == [item.num_rows for item in batch.items] == [8, 3, 5]
    ids = torch.tensor([[5, *[placeholder] * 16, 6]])
    seen: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=sound(3),
            feature_attention_mask=masks(*lengths),
        )
    hook.remove()
    assert close(torch.cat(found), seen[0][0, 1:17])


def test_what_lies_behind_the_sound_in_a_window_counts_through_the_convolutions_alone() -> None:
    """The features of the stock model see a few frames of padding there; more of it changes nothing."""
    with Encoder(whole("qwen2_audio-7b@tiny"), CONFIG) as encoder:
        windows = sound(1)
        first = encoder.encode_inputs(input_features=windows, feature_attention_mask=masks(12))[0]
        windows[..., 16:] = 100.0
        assert torch.equal(encoder.encode_inputs(input_features=windows, feature_attention_mask=masks(12))[0], first)


@pytest.mark.parametrize(
    ("mask", "why"),
    [(masks(12)[:, :-1], "ask for"), (masks(12).flip(-1), "padding lies on the right"), (masks(1), "too short")],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Tensor, why: str) -> None:
    with Encoder(whole("qwen2_audio-7b@tiny"), CONFIG) as encoder, pytest.raises(InputError, match=why):
        encoder.encode_inputs(input_features=sound(1), feature_attention_mask=mask)


@pytest.mark.parametrize("name", CLASSES)
def test_a_checkpoint_gives_its_audio_weights_alone(name: str, tmp_path: Path) -> None:
    model = whole(name)
    model.save_pretrained(tmp_path)
    with Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=CONFIG) as encoder:
        inputs = encoder.adapter.example_inputs(encoder.adapter.layouts("audio", 48, 3)[0][1], torch.Generator())
        base = model.model
        expected = torch.cat([part.reshape(-1, part.shape[-1]) for part in stock(base, inputs)])
        assert close(torch.cat(encoder.encode_inputs(**inputs)), expected)
        other = encoder.adapter.model.decoder if "whisper" in name else encoder.adapter.model.language_model
        assert not list(other.parameters())


def stock(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return adapter_for(model).stock_features(model, inputs)


def test_accelerate_refuses_a_model_without_a_stock_method() -> None:
    with pytest.raises(UnsupportedModelError, match="qwen2_audio has no stock method"):
        accelerate(whole("qwen2_audio-7b@tiny"), CONFIG)
