"""Qwen2.5-Omni: recordings of any length, cut into chunks, beside images and videos.

Tolerance: the fp32 rule of `onereplay.checking`, 1e-5 of the largest reference value.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

from onereplay import Encoder, EncoderCudaGraphConfig, accelerate
from onereplay.adapters import adapter_for
from onereplay.adapters.qwen2_5_omni import OmniAudio, Qwen25Omni
from onereplay.checking import FP32_TOLERANCE
from onereplay.config import REWRITES
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Eager, Reason, Replay, demand_of
from onereplay.errors import InputError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.presets import get_preset, hf_config
from tests.adapters.checkpoints import write_checkpoint

CONFIG = EncoderCudaGraphConfig(token_budgets=(64, 96), backend="traced")
TINY, FULL = "qwen2_5_omni-7b@tiny", "qwen2_5_omni-7b"
BANDS, CHUNK = 8, 16
"""Of the tiny preset; a chunk has 8 rows and 4 tokens."""
EDGES = (3, 4, 5, 15, 16, 17, 18, 19, 31, 32, 33, 47)
"""Frames: the shortest recording, and both sides of chunks' edges."""
AUDIO, IMAGE, VIDEO, AUDIO_START, AUDIO_END, START, END = 59, 62, 63, 57, 58, 60, 61
"""Token ids of the preset."""


def thinker() -> Any:
    model = Qwen2_5OmniThinkerForConditionalGeneration(hf_config(get_preset(TINY))).eval()
    random_weights_(model, tuple(name for name, _ in model.named_children()))
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    """Never accelerated."""
    return thinker()


@pytest.fixture(scope="module")
def encoder(model: Any) -> Iterator[Encoder]:
    with Encoder(model, CONFIG) as made:
        yield made


def sound(*lengths: int, width: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Recordings of these lengths, with noise behind the sound too."""
    frames = width or max(lengths)
    features = torch.randn(len(lengths), BANDS, frames, generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(frames) < torch.tensor(lengths)[:, None]).long()
    return {"input_features": features, "feature_attention_mask": mask}


def pictures(encoder: Encoder, *grids: Grid) -> dict[str, Tensor]:
    return encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(1))


def close(found: Tensor, expected: Tensor) -> bool:
    largest = expected.abs().max().clamp(min=1)
    return found.shape == expected.shape and bool((found - expected).abs().max() <= FP32_TOLERANCE * largest)


def stock(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """All rows of the stock entry points, in the order of the adapter's batch."""
    with torch.no_grad():
        adapter = adapter_for(model)
        return torch.cat(adapter.stock_features(adapter.model, inputs))


def by_hand(tower: Any, features: Tensor) -> Tensor:
    """The audio tower for one recording `(bands, frames)`, a loop over its chunks."""
    parts = []
    for chunk in features.split(CHUNK, dim=1):
        rows = functional.gelu(functional.conv1d(chunk[None], tower.conv1.weight, tower.conv1.bias, padding=1))
        rows = functional.gelu(functional.conv1d(rows, tower.conv2.weight, tower.conv2.bias, stride=2, padding=1))
        x = rows[0].T + tower.positional_embedding.positional_embedding[: rows.shape[-1]]
        for layer in tower.layers:
            attention, normed = layer.self_attn, layer.self_attn_layer_norm(x)
            q, k, v = (
                part(normed).unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            seen = torch.softmax(q @ k.mT * attention.head_dim**-0.5, dim=-1) @ v
            x = x + attention.out_proj(seen.transpose(0, 1).flatten(1))
            x = x + layer.fc2(functional.gelu(layer.fc1(layer.final_layer_norm(x))))
        parts.append(x)
    pooled = functional.avg_pool1d(torch.cat(parts).T[None], 2)[0].T
    rows_out: Tensor = tower.proj(tower.ln_post(pooled))
    return rows_out


# ------------------------------------------------------------------ lengths and chunks


def test_tokens_follow_the_published_formula() -> None:
    """A second has 25 of them; the stock tower says how many rows and tokens a number of frames makes."""
    adapter = Qwen25Omni(hf_config(get_preset(FULL)))
    published = Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths
    frames = torch.arange(3, 1300)
    items = adapter.items_of(audio_feature_lengths=frames)
    rows, tokens = published(None, frames)
    assert [item.num_rows for item in items] == [item.num_tokens for item in items] == tokens.tolist()
    assert [item.sizes["audio"].patches for item in items] == rows.tolist()
    assert [item.sizes["audio"].sequences for item in items] == [-(-count // 200) for count in frames.tolist()]
    assert adapter.items_of(audio_feature_lengths=[3000])[0].num_tokens == 30 * 25


@pytest.mark.parametrize("width", [None, 64, 49])
def test_recordings_of_every_length_are_one_replay_and_as_the_stock_model_has_them(
    width: int | None, model: Any, encoder: Encoder
) -> None:
    inputs = sound(*EDGES, width=width)
    batch = encoder.adapter.batch(**inputs)
    assert isinstance(encoder.manager.plan(batch).steps["audio"], Replay)
    found = encoder.manager.encode(batch)
    assert [len(rows) for rows in found] == [(frames + 1) // 2 // 2 for frames in EDGES]
    assert close(torch.cat(found), stock(model, inputs))


def test_recordings_are_as_a_loop_over_their_chunks_makes_them(encoder: Encoder) -> None:
    inputs = sound(*EDGES)
    with torch.no_grad():
        for frames, features, rows in zip(
            EDGES, inputs["input_features"], encoder.encode_inputs(**inputs), strict=True
        ):
            assert close(rows, by_hand(encoder.adapter.model.audio_tower, features[:, :frames]))


def test_a_chunk_does_not_hear_its_neighbours(encoder: Encoder) -> None:
    inputs = sound(3 * CHUNK)
    (whole,) = encoder.encode_inputs(**inputs)
    chunks = inputs["input_features"].reshape(1, BANDS, 3, CHUNK)[0].transpose(0, 1)
    assert close(torch.cat(encoder.encode_inputs(input_features=chunks)), whole)


def test_what_lies_behind_the_sound_does_not_count(encoder: Encoder) -> None:
    inputs = sound(*EDGES, width=64)
    expected = encoder.encode_inputs(**inputs)
    for noise in (100.0, torch.nan, torch.inf):
        silent = inputs["input_features"].masked_fill(inputs["feature_attention_mask"][:, None] == 0, noise)
        found = encoder.encode_inputs(**{**inputs, "input_features": silent})
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_sound_of_nan_leaves_no_trace_in_the_next_batch(encoder: Encoder) -> None:
    inputs = sound(40, 33)
    expected = encoder.encode_inputs(**inputs)
    lost = encoder.encode_inputs(input_features=torch.full((5, BANDS, 4 * CHUNK), torch.nan))
    assert all(rows.isnan().all() for rows in lost)
    found = encoder.encode_inputs(**inputs)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_lengths_serve_in_place_of_a_mask_and_without_either_all_is_sound(encoder: Encoder) -> None:
    inputs = sound(40, 33)
    features, expected = inputs["input_features"], encoder.encode_inputs(**inputs)
    for lengths in ([40, 33], torch.tensor([40, 33])):
        found = encoder.encode_inputs(input_features=features, audio_feature_lengths=lengths)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert [len(rows) for rows in encoder.encode_inputs(input_features=features)] == [10, 10]


@pytest.mark.parametrize("budget", [64, 80, 5120])
def test_every_layout_at_both_edges_of_a_budget_fits_it(budget: int) -> None:
    adapter = OmniAudio(hf_config(get_preset(FULL)))
    config = EncoderCudaGraphConfig(token_budgets=(budget,))
    (capacity,) = adapter.capacities("audio", config)
    for tokens in (1, 2, 3, 25, 26, 49, 50, 51, budget - 1, budget):
        for name, grids in adapter.layouts("audio", tokens, capacity.items):
            items = adapter.items_of(audio_feature_lengths=[grid.w for grid in grids])
            assert sum(item.num_tokens for item in items) == tokens
            assert capacity.holds(demand_of(items, "audio")), (tokens, name)


def test_captured_rows_come_from_the_budget_alone() -> None:
    adapter = OmniAudio(hf_config(get_preset(FULL)))
    for items in (1, 8, 64):
        (capacity,) = adapter.capacities(
            "audio", EncoderCudaGraphConfig(token_budgets=(1000,), max_items_per_batch=items)
        )
        assert (capacity.patches, capacity.sequences, capacity.longest) == (2008, 48, 100)


def test_more_short_recordings_than_chunk_slots_are_one_eager_forward_and_right(model: Any, encoder: Encoder) -> None:
    """60 recordings of a token, with slots for 56 chunks in the largest budget."""
    inputs = sound(*[4] * 60)
    batch = encoder.adapter.batch(**inputs)
    step = encoder.manager.plan(batch).steps["audio"]
    assert isinstance(step, Eager)
    assert step.reason is Reason.TOO_MANY_SEQUENCES
    assert close(torch.cat(encoder.manager.encode(batch)), stock(model, inputs))


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (sound(12) | {"input_features": torch.zeros(1, BANDS + 1, 12)}, r"takes \(recordings, 8, frames\)"),
        (sound(12) | {"input_features": torch.zeros(BANDS, 12)}, r"takes \(recordings, 8, frames\)"),
        (sound(12) | {"feature_attention_mask": torch.ones(1, 11)}, "input_features ask for"),
        (sound(12) | {"feature_attention_mask": torch.arange(12)[None] > 5}, "padding lies on the right"),
        (sound(2), "recording of 2 frames is too short.*give at least 3"),
        (sound(12, 0), "recording of 0 frames is too short"),
        ({"feature_attention_mask": torch.ones(1, 12)}, "says what of input_features is sound; give them too"),
        ({"input_features": torch.zeros(1, BANDS, 12), "audio_feature_lengths": [13]}, "none over its frames"),
        ({"input_features": torch.zeros(1, BANDS, 12), "audio_feature_lengths": [6, 6]}, "one entry a recording"),
        ({"input_features": torch.zeros(1, BANDS, 12), "audio_feature_lengths": [0]}, "positive integers"),
        ({"input_features": [[0.0]]}, "give a tensor of PyTorch"),
    ],
)
def test_recordings_that_do_not_fit_are_refused(inputs: dict[str, Any], why: str, encoder: Encoder) -> None:
    with pytest.raises(InputError, match=why):
        encoder.encode_inputs(**inputs)


def test_a_file_of_audio_is_refused_with_what_to_do(encoder: Encoder, tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    file.write_bytes(b"RIFF\x24\0\0\0WAVEfmt ")
    with pytest.raises(InputError, match=r"files of audio are not read here.*encode_inputs"):
        encoder.encode([file])


# ------------------------------------------------------------------ both towers


def test_pictures_and_sound_in_one_batch_are_one_replay_on_each_path(model: Any) -> None:
    with Encoder(model, CONFIG) as encoder:
        inputs = pictures(encoder, Grid(1, 4, 6), Grid(3, 4, 4), Grid(1, 8, 8)) | sound(40, 33, 5)
        found = encoder.encode_inputs(**inputs)
        assert [len(rows) for rows in found] == [6, 16, 12, 10, 8, 1]
        assert close(torch.cat(found), stock(model, inputs))
        assert encoder.report().replays == {"vision": {64: 1}, "audio": {64: 1}}
        assert not any(encoder.report().eager.values())


def test_a_path_over_its_largest_budget_leaves_the_other_a_replay(model: Any) -> None:
    with Encoder(model, CONFIG) as encoder:
        inputs = pictures(encoder, Grid(1, 4, 6)) | sound(400)
        batch = encoder.adapter.batch(**inputs)
        steps = encoder.manager.plan(batch).steps
        assert isinstance(steps["vision"], Replay)
        assert isinstance(steps["audio"], Eager)
        assert close(torch.cat(encoder.manager.encode(batch)), stock(model, inputs))


def test_items_of_several_batches_keep_their_order_and_any_of_them_can_be_taken(encoder: Encoder) -> None:
    adapter = encoder.adapter
    first, second = (
        adapter.batch(**pictures(encoder, grid) | sound(*lengths, seed=seed))
        for seed, (grid, lengths) in enumerate(((Grid(1, 4, 6), (40, 5)), (Grid(1, 8, 8), (17,))))
    )
    joined = adapter.join([first, second])
    assert [len(rows) for rows in encoder.manager.encode(joined)] == [6, 10, 1, 16, 4]
    everything = encoder.manager.encode(joined)
    for chosen in itertools.permutations(range(5), 3):
        found = encoder.manager.encode(adapter.select(joined, chosen))
        assert all(close(rows, everything[place]) for rows, place in zip(found, chosen, strict=True))


def test_sizes_alone_give_the_items_of_both_kinds(encoder: Encoder) -> None:
    inputs = pictures(encoder, Grid(1, 4, 6), Grid(3, 4, 4)) | sound(40, 5)
    sizes = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw")}
    assert encoder.adapter.items_of(**sizes, audio_feature_lengths=[40, 5]) == encoder.adapter.batch(**inputs).items


def test_blocks_of_both_towers_compile_whole_and_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant for the audio layers, and for the vision blocks at most the six that `tests/optimize` allows."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compile_(fn, backend="eager", **options))
    torch._dynamo.reset()
    counters.clear()
    model = thinker()
    adapter = adapter_for(model, EncoderCudaGraphConfig(backend="cuda", optimize=REWRITES))
    manager = EncoderCudaGraphManager(adapter)
    seen = []
    for lengths in ((40, 33), (16,), (3, 4, 5, 90)):
        found = manager.encode(adapter.batch(**sound(*lengths)))
        assert close(torch.cat(found), stock(model, sound(*lengths)))
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[-1] <= 2
    assert not counters["graph_break"]
    torch._dynamo.reset()


# ------------------------------------------------------------------ accelerate


def prompt(lengths: tuple[int, ...], image_tokens: int) -> dict[str, Tensor]:
    ids = [5, START, *[IMAGE] * image_tokens, END]
    for frames in lengths:
        ids += [AUDIO_START, *[AUDIO] * ((frames + 1) // 2 // 2), AUDIO_END, 7]
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


def test_the_accelerated_thinker_generates_the_same_tokens_from_an_image_and_sound(model: Any) -> None:
    accelerated, lengths = thinker(), (40, 17)
    with accelerate(accelerated, CONFIG) as handle:
        inputs = prompt(lengths, 6) | sound(*lengths)
        inputs |= {"pixel_values": torch.randn(24, 1176), "image_grid_thw": torch.tensor([[1, 4, 6]])}
        found, expected = (
            each.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None)
            for each in (accelerated, model)
        )
        assert torch.equal(found, expected)
        assert handle.report().replays == {"vision": {64: 1}, "audio": {64: 1}}
        assert not any(handle.report().eager.values())


def test_accelerated_features_keep_their_type_and_values(model: Any) -> None:
    accelerated, inputs = thinker(), sound(40, 17)
    with accelerate(accelerated, CONFIG), torch.no_grad():
        found, expected = (each.get_audio_features(**inputs) for each in (accelerated, model))
        assert type(found) is type(expected)
        assert close(found.last_hidden_state, expected.last_hidden_state)
        if expected.pooler_output is not None:  # 5.17 gives none
            assert close(found.pooler_output, expected.pooler_output)
        image = pictures_of(accelerated)
        pair = [each.get_image_features(**image).pooler_output for each in (accelerated, model)]
        assert all(close(*rows) for rows in zip(*pair, strict=True))


def pictures_of(model: Any) -> dict[str, Tensor]:
    return adapter_for(model).example_inputs([Grid(1, 4, 6), Grid(1, 4, 4)], torch.Generator().manual_seed(1))


def test_a_call_with_metadata_of_its_own_goes_to_the_stock_method() -> None:
    accelerated, inputs = thinker(), sound(32)
    with accelerate(accelerated, CONFIG) as handle, torch.no_grad():
        expected = accelerated.get_audio_features(**inputs).last_hidden_state
        own = torch.tensor([0, 8, 16], dtype=torch.int32)
        found = accelerated.get_audio_features(**inputs, audio_cu_seqlens=own).last_hidden_state
        assert close(found, expected)
        assert [sum(counts.values()) for counts in handle.report().eager.values()] == [0, 1]


def test_a_whole_omni_model_is_accelerated_in_its_thinker() -> None:
    config = Qwen2_5OmniConfig(thinker_config=get_preset(TINY).config, enable_audio_output=False)
    whole = Qwen2_5OmniForConditionalGeneration(config).eval()
    inputs = sound(40, 17)
    with torch.no_grad():
        expected = whole.thinker.get_audio_features(**inputs).last_hidden_state
        with accelerate(whole, CONFIG) as handle:
            assert close(whole.thinker.get_audio_features(**inputs).last_hidden_state, expected)
            assert handle.report().replays == {"vision": {}, "audio": {64: 1}}


# ------------------------------------------------------------------ checkpoints and presets


def published_name(name: str) -> str:
    """As in the checkpoint of a whole Qwen2.5-Omni, which transformers 5.17 and its thinker name alike."""
    for old, new in (
        ("model.language_model.", "model."),
        ("model.audio_tower.", "audio_tower."),
        ("model.visual.", "visual."),
    ):
        if name.startswith(old):
            return f"thinker.{new}{name.removeprefix(old)}"
    return f"thinker.{name}"


def test_the_checkpoint_of_a_whole_model_gives_the_weights_of_both_encoders_alone(model: Any, tmp_path: Path) -> None:
    tensors = {published_name(name): value for name, value in model.state_dict().items()}
    tensors |= {"talker.model.norm.weight": torch.ones(4), "token2wav.code2wav_dit_model.norm": torch.ones(4)}
    config = {"model_type": "qwen2_5_omni", "thinker_config": {**get_preset(TINY).config}}
    write_checkpoint(tmp_path, config, tensors)
    with Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=CONFIG) as encoder:
        inputs = pictures(encoder, Grid(1, 4, 6)) | sound(40, 17)
        assert close(torch.cat(encoder.encode_inputs(**inputs)), stock(model, inputs))
        held = {name.partition(".")[0] for name, _ in encoder.adapter.model.named_parameters()}
        assert held == {"visual", "audio_tower"}


def test_a_thinker_saved_by_transformers_loads(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=CONFIG) as encoder:
        inputs = pictures(encoder, Grid(1, 4, 6)) | sound(40, 17)
        assert close(torch.cat(encoder.encode_inputs(**inputs)), stock(model, inputs))


@pytest.mark.parametrize("spec", ["qwen2_5_omni-3b", "qwen2_5_omni-7b", TINY])
def test_the_preset_writes_every_size_of_the_audio_encoder(spec: str) -> None:
    """`tests/test_presets.py` asks the same of the vision tower."""
    preset = get_preset(spec)
    config, written = hf_config(preset).audio_config, preset.config["audio_config"]
    assert all(getattr(config, name) == value for name, value in written.items())
    left = set(type(config)().to_dict()) - set(written)
    assert not {
        name for name in left if name.endswith(("size", "layers", "heads", "positions", "dim", "window", "bins"))
    } - {"chunk_size_feed_forward"}
    assert config.output_dim == hf_config(preset).text_config.hidden_size
    assert config.d_model // config.encoder_attention_heads % 8 == 0
