"""`Encoder` from sources to features, held against plain transformers on the same weights.

Tolerance: the fp32 rule of `onereplay.checking`, 1e-5 of the largest reference value (both sides compute the same sums
in another order). In half precision the error against float32 is at most 1.1 times that of plain transformers, as
there. Where two calls must run the same operations on the same numbers, the bits are compared.
"""

import base64
import copy
import importlib.util
import io
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_for
from onereplay.checking import FP32_TOLERANCE, HALF_RATIO, plain_features
from onereplay.core.items import Modality
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.encoder import Encoded, Encoder, VideoOptions, planner
from onereplay.errors import (
    ClosedError,
    ConfigError,
    InputError,
    MediaError,
    MissingDependencyError,
    OnereplayError,
    UnsupportedModelError,
)
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.media import Video, load_image, load_video
from onereplay.preprocess import load_image_processor, preprocess_images, preprocess_video
from onereplay.presets import get_preset, hf_config

PHOTOS = Path(__file__).parent.parent / "examples" / "photos"
ASTRONAUT, CHELSEA = PHOTOS / "astronaut.jpg", PHOTOS / "chelsea.png"
"""512x512 and 451x300 pixels: 324 and 176 tokens of Qwen2.5-VL."""
TINY = {"qwen2_5_vl": "qwen2_5_vl-7b@tiny", "internvl": "internvl3-8b@tiny", "lfm2_vl": "lfm2_vl-450m@tiny"}
CONFIG = EncoderCudaGraphConfig(token_budgets=(64, 256, 512))
"""Traced on first use: a test pays for the graphs that it replays."""
WITH_PHOTOS = ("qwen2_5_vl", "internvl")
"""Model types whose image processor works without torchvision."""


# ------------------------------------------------------------------ helpers


def made(model_type: str = "qwen2_5_vl", config: EncoderCudaGraphConfig = CONFIG, **options: Any) -> Encoder:
    return Encoder.from_preset(TINY[model_type], config=config, device="cpu", **options)


@pytest.fixture(scope="module", params=sorted(TINY))
def encoder(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    """A tiny random encoder of each registered model, shared by tests that do not read its counters."""
    with made(request.param) as shared:
        yield shared


@pytest.fixture(scope="module", params=WITH_PHOTOS)
def photo_encoder(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    with made(request.param) as shared:
        yield shared


@pytest.fixture(scope="module")
def qwen() -> Iterator[Encoder]:
    with made() as shared:
        yield shared


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two mp4 files of moving noise, 64x48, one second and two."""
    folder = tmp_path_factory.mktemp("clips")
    return write_clip(folder / "short.mp4", 10, seed=0), write_clip(folder / "long.mp4", 20, seed=1)


def write_clip(path: Path, num_frames: int, seed: int) -> Path:
    av = pytest.importorskip("av")
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 4_000_000
        for index in range(num_frames):
            frame = np.roll(small, index, axis=1).repeat(8, axis=0).repeat(8, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return path


def square(side: int, seed: int) -> Image.Image:
    """Noise of `side` pixels; in Qwen2.5-VL a token is 28x28 of them."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def whole_model(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A tiny random `...ForConditionalGeneration`."""
    model = AutoModelForImageTextToText.from_config(hf_config(get_preset(TINY[model_type])), dtype=dtype).eval()
    random_weights_(model, tuple(name for name, _ in model.named_children()), seed)
    return model


def example(encoder: Encoder, tokens: int = 64, seed: int = 0, layout: int = 0) -> dict[str, Any]:
    """Random inputs of exactly this many tokens, by the processor's names."""
    _, grids = encoder.adapter.layouts("vision", tokens, 8)[layout]
    return dict(encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(seed)))


def plain(encoder: Encoder, inputs: dict[str, Any]) -> Tensor:
    return plain_features(encoder.adapter, encoder.adapter.model, inputs)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def stock_rows(encoder: Encoder, source: Any, video: VideoOptions | None = None) -> Tensor:
    """What plain transformers gives for one photo or clip: image processor, then the stock entry point."""
    adapter, processor = encoder.adapter, encoder.preprocessor.processor
    if (isinstance(source, Path) and source.suffix == ".mp4") or isinstance(source, Video):
        video = video or VideoOptions()
        clip = load_video(source, fps=video.fps, max_frames=video.max_frames)
        return plain(encoder, dict(preprocess_video(processor, adapter.model_type, clip)))
    return plain(encoder, dict(preprocess_images(processor, adapter.model_type, [load_image(source)])))


# ------------------------------------------------------------------ where an encoder comes from


def test_a_preset_by_name_and_by_spec_are_the_same_encoder(encoder: Encoder) -> None:
    """Tokens over the largest budget: eager forwards, which need no trace."""
    spec = f"preset:{TINY[encoder.adapter.model_type]}"
    inputs = example(encoder, tokens=516)
    with Encoder.from_spec(spec, config=CONFIG, device="cpu") as other:
        assert_same(other.encode_inputs(**inputs), encoder.encode_inputs(**inputs))
        assert (other.device, other.dtype) == (torch.device("cpu"), torch.float32)
    with Encoder.from_spec(spec, config=CONFIG, device="cpu", seed=1) as other:
        assert not torch.equal(other.encode_inputs(**inputs)[0], encoder.encode_inputs(**inputs)[0])


@pytest.fixture(scope="module", params=["one file", "sharded"])
def how_saved(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"max_shard_size": "100KB"} if request.param == "sharded" else {}


@pytest.fixture(scope="module", params=sorted(TINY))
def checkpoint(
    request: pytest.FixtureRequest, how_saved: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A whole tiny model as `save_pretrained` writes it, with its image processor where there is one."""
    folder = tmp_path_factory.mktemp(request.param)
    whole_model(request.param).save_pretrained(folder, **how_saved)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(how_saved)
    if request.param in WITH_PHOTOS:
        load_image_processor(get_preset(TINY[request.param]).processor).save_pretrained(folder)
    return request.param, folder


def test_a_checkpoint_gives_what_plain_transformers_gives(checkpoint: tuple[str, Path]) -> None:
    model_type, folder = checkpoint
    stock = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with Encoder.from_pretrained(folder, config=CONFIG, device="cpu") as encoder:
        if model_type in WITH_PHOTOS:
            (found,) = encoder.encode([CHELSEA])
            processor = encoder.preprocessor.processor
            inputs = dict(preprocess_images(processor, model_type, [load_image(CHELSEA)]))
        else:
            inputs = example(encoder)
            found = torch.cat(encoder.encode_inputs(**inputs))
        expected = plain_features(encoder.adapter, stock.model, inputs)
        assert_close(found, expected)
        assert_same([plain(encoder, inputs)], [expected])  # the same weights, so the same bits
        assert sum(encoder.report().replays["vision"].values()) == 1


def test_a_checkpoint_by_spec_and_in_another_dtype(tmp_path: Path) -> None:
    whole_model("qwen2_5_vl").save_pretrained(tmp_path)
    with Encoder.from_spec(str(tmp_path), config=CONFIG, device="cpu", dtype=torch.bfloat16) as encoder:
        assert {rows.dtype for rows in encoder.encode_inputs(**example(encoder))} == {torch.bfloat16}


def test_a_checkpoint_without_an_image_processor_still_takes_pixels(tmp_path: Path) -> None:
    whole_model("qwen2_5_vl").save_pretrained(tmp_path)
    with Encoder.from_pretrained(tmp_path, config=CONFIG, device="cpu") as encoder:
        inputs = example(encoder)
        assert_close(torch.cat(encoder.encode_inputs(**inputs)), plain(encoder, inputs))
        with pytest.raises(OnereplayError, match="image processor"):
            encoder.encode([CHELSEA])


def test_the_base_model_and_the_whole_model_serve_alike(encoder: Encoder) -> None:
    model = whole_model(encoder.adapter.model_type)
    with Encoder(model, CONFIG) as whole, Encoder(model.model, CONFIG) as base:
        inputs = example(whole, tokens=516)
        assert whole.adapter.model is base.adapter.model is model.model
        assert_same(whole.encode_inputs(**inputs), base.encode_inputs(**inputs))


def test_a_model_without_a_processor_says_what_to_do() -> None:
    with Encoder(whole_model("qwen2_5_vl"), CONFIG) as encoder:
        with pytest.raises(InputError, match=r"no image processor; give Encoder\(model, processor=\.\.\.\) one"):
            encoder.encode([CHELSEA])
        with pytest.raises(InputError, match="no image processor"):
            encoder.encode([CHELSEA], on_error="raise")


def test_a_processor_object_a_whole_processor_and_a_mapping_serve_alike() -> None:
    model = whole_model("qwen2_5_vl")
    settings = get_preset(TINY["qwen2_5_vl"]).processor
    loaded = load_image_processor(settings)

    class Whole:
        """As `Qwen2_5_VLProcessor`: the image processor is one of its parts."""

        image_processor = loaded

    batches = []
    for processor in (settings, loaded, Whole()):
        with Encoder(model, CONFIG, processor=processor) as encoder:
            batches.append(encoder.preprocessor.batch(CHELSEA))
    assert batches[0].items == batches[1].items == batches[2].items
    assert_same([batch.pixels[0] for batch in batches[1:]], [batches[0].pixels[0]] * 2)


@pytest.mark.parametrize(
    ("spec", "config", "error", "match"),
    [
        ("preset:qwen2_5_vl-7b@tiny", {"backend": "cuda"}, ConfigError, "needs a CUDA device"),
        ("preset:qwen2_5_vl-7b@tiny", {"attention": "fa2"}, ConfigError, "needs a CUDA device"),
        ("preset:internvl3-8b", {"max_token_budget": 255}, ConfigError, "holds no tile of 256 tokens"),
        ("preset:qwen2_5_vl-8b", {}, ConfigError, "no preset 'qwen2_5_vl-8b'; there are"),
        ("preset:qwen2_5_vl-7b@small", {}, ConfigError, "each also as NAME@tiny"),
    ],
)
def test_bad_options_are_refused_before_weights_are_made(
    spec: str, config: dict[str, Any], error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on_weights(monkeypatch)
    with pytest.raises(error, match=match):
        Encoder.from_spec(spec, config=EncoderCudaGraphConfig(**config), device="cpu")


@pytest.mark.parametrize("config", [{"backend": "cuda"}, {"attention": "fa4"}], ids=str)
def test_bad_options_are_refused_before_a_checkpoint_is_read(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_config(get_preset(TINY["qwen2_5_vl"])).save_pretrained(tmp_path)
    fail_on_weights(monkeypatch)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        Encoder.from_pretrained(tmp_path, config=EncoderCudaGraphConfig(**config), device="cpu")


def test_a_model_type_without_an_adapter_is_refused_before_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    fail_on_weights(monkeypatch)
    with pytest.raises(
        UnsupportedModelError, match=r"no adapter for model type 'bert'; there are adapters for .*internvl"
    ):
        Encoder.from_pretrained(tmp_path, device="cpu")


def fail_on_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vision_model", "load_vision_model", "load_vision_weights_", "random_weights_"):
        monkeypatch.setattr(f"onereplay.loading.{name}", lambda *a, **k: pytest.fail("weights were touched"))


def test_what_is_not_a_vision_language_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no adapter for model type 'Linear'"):
        Encoder(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="has no visual; give the whole model or its base model"):
        Encoder(whole_model("qwen2_5_vl").model.language_model.__class__._from_config(_as_qwen()))


def _as_qwen() -> Any:
    """A text configuration that says it is the whole model's."""
    config = hf_config(get_preset(TINY["qwen2_5_vl"])).get_text_config()
    config.model_type = "qwen2_5_vl"
    return config


# ------------------------------------------------------------------ photos


def test_a_photo_gives_what_plain_transformers_gives(photo_encoder: Encoder) -> None:
    for photo in (ASTRONAUT, CHELSEA):
        (found,) = photo_encoder.encode([photo])
        assert_close(found, stock_rows(photo_encoder, photo))


def test_every_kind_of_source_gives_the_same_bits(photo_encoder: Encoder) -> None:
    data = CHELSEA.read_bytes()
    pixels = np.asarray(Image.open(CHELSEA).convert("RGB"))
    sources: list[Any] = [
        str(CHELSEA),
        data,
        bytearray(data),
        Image.open(io.BytesIO(data)),
        pixels,
        torch.from_numpy(pixels.copy()),
        f"data:image/png;base64,{base64.b64encode(data).decode()}",
        io.BytesIO(data),
    ]
    expected = photo_encoder.encode([CHELSEA])
    for source in sources:
        assert_same(photo_encoder.encode([source]), expected)
    with CHELSEA.open("rb") as file:
        assert_same(photo_encoder.encode([file]), expected)


def test_a_batch_of_photos_is_one_replay_in_the_callers_order(qwen: Encoder) -> None:
    photos: list[Any] = [CHELSEA, square(140, 0), CHELSEA, square(28, 1)]
    before = qwen.report()
    found = qwen.encode(photos)
    after = qwen.report()
    for rows, photo in zip(found, photos, strict=True):
        assert_close(rows, stock_rows(qwen, photo))
    assert (after.batches - before.batches, after.items - before.items) == (1, 4)
    assert after.replays["vision"][512] - before.replays["vision"].get(512, 0) == 1
    assert after.eager == before.eager


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("photo.jpg", id="str"),
        pytest.param(Path("photo.jpg"), id="Path"),
        pytest.param(b"\x89PNG", id="bytes"),
        pytest.param(bytearray(b"\x89PNG"), id="bytearray"),
        pytest.param(memoryview(b"\x89PNG"), id="memoryview"),
        pytest.param(square(28, 0), id="PIL"),
        pytest.param(np.zeros((28, 28, 3), np.uint8), id="numpy"),
        pytest.param(torch.zeros(3, 28, 28), id="tensor"),
        pytest.param(io.BytesIO(b""), id="file"),
        pytest.param(Video((square(28, 0),), (0.0,), 1.0), id="Video"),
        pytest.param({"a": 1}, id="dict"),
        pytest.param(None, id="None"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_one_source_in_place_of_a_list_is_an_input_error(qwen: Encoder, source: Any, on_error: Any) -> None:
    with pytest.raises(InputError, match=r"encode takes a list of images and videos, got .*; put it in a list"):
        qwen.encode(source, on_error=on_error)


def test_a_tuple_of_sources_is_a_list_of_them(qwen: Encoder) -> None:
    assert_same(qwen.encode((CHELSEA,)), qwen.encode([CHELSEA]))


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_lfm2_vl_without_torchvision_names_the_install_line_and_takes_pixels() -> None:
    with made("lfm2_vl") as encoder:
        for call in (lambda: encoder.encode([CHELSEA]), lambda: encoder.encode([CHELSEA], on_error="return")):
            with pytest.raises(MissingDependencyError, match=r'pip install "onereplay\[torchvision\]"'):
                call()
        with pytest.raises(MissingDependencyError, match="torchvision"):
            list(encoder.encode_each([CHELSEA]))
        inputs = example(encoder, layout=1)
        assert_close(torch.cat(encoder.encode_inputs(**inputs)), plain(encoder, inputs))


# ------------------------------------------------------------------ videos


def test_a_video_gives_what_plain_transformers_gives(photo_encoder: Encoder, clips: tuple[Path, Path]) -> None:
    for clip in clips:
        (found,) = photo_encoder.encode([clip])
        assert_close(found, stock_rows(photo_encoder, clip))


def test_video_options_say_how_many_frames_there_are(photo_encoder: Encoder, clips: tuple[Path, Path]) -> None:
    _, clip = clips
    options = VideoOptions(fps=10, max_frames=6)
    (found,) = photo_encoder.encode([clip], video=options)
    assert_close(found, stock_rows(photo_encoder, clip, options))
    (fewer,) = photo_encoder.encode([clip], video=VideoOptions(max_frames=2))
    assert len(fewer) * 3 == len(found)


def test_a_video_from_bytes_a_file_and_its_frames_gives_the_same_bits(
    photo_encoder: Encoder, clips: tuple[Path, Path]
) -> None:
    clip, _ = clips
    expected = photo_encoder.encode([clip])
    decoded = load_video(clip, fps=2.0)
    for source in (str(clip), clip.read_bytes(), io.BytesIO(clip.read_bytes()), decoded):
        assert_same(photo_encoder.encode([source]), expected)


def test_images_and_videos_mixed_keep_the_callers_order(photo_encoder: Encoder, clips: tuple[Path, Path]) -> None:
    sources: list[Any] = [clips[1], CHELSEA, clips[0], square(140, 1), clips[1]]
    before = photo_encoder.report()
    found = photo_encoder.encode(sources)
    after = photo_encoder.report()
    for rows, source in zip(found, sources, strict=True):
        assert_close(rows, stock_rows(photo_encoder, source))
    assert after.batches - before.batches == 1
    assert after.items - before.items == len(sources)


def test_lfm2_vl_refuses_a_video_in_words(clips: tuple[Path, Path]) -> None:
    with made("lfm2_vl") as encoder:
        encoder.preprocessor.__dict__["processor"] = object()  # never asked: the refusal comes first
        with pytest.raises(InputError, match="lfm2_vl takes images only"):
            encoder.encode([clips[0]])


# ------------------------------------------------------------------ bad sources


def test_a_bad_source_is_returned_in_its_place_and_the_rest_is_encoded(photo_encoder: Encoder, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    missing = tmp_path / "missing.png"
    found = photo_encoder.encode([broken, CHELSEA, missing, b"", CHELSEA], on_error="return")
    assert [isinstance(entry, MediaError) for entry in found] == [True, False, True, True, False]
    for place in (0, 2):
        assert str(tmp_path) in str(found[place])
    errors = [entry for entry in found if isinstance(entry, OnereplayError)]
    assert [error.__notes__[0].partition(":")[0] for error in errors] == ["source 0", "source 2", "source 3"]
    (expected,) = photo_encoder.encode([CHELSEA])
    for place in (1, 4):
        rows = found[place]
        assert isinstance(rows, Tensor)
        assert_close(rows, expected)


def test_only_bad_sources_run_nothing(tmp_path: Path) -> None:
    with made() as encoder:
        found = encoder.encode([tmp_path / "a.png", 3], on_error="return")
        assert all(isinstance(entry, InputError) for entry in found)
        assert encoder.encode([], on_error="return") == []
        assert encoder.report().batches == 0


def test_by_default_the_first_bad_source_is_raised_and_nothing_runs(tmp_path: Path) -> None:
    with made() as encoder:
        with pytest.raises(MediaError, match=r"missing\.png") as raised:
            encoder.encode([CHELSEA, tmp_path / "missing.png", tmp_path / "other.png"])
        assert raised.value.__notes__ == [f"source 1: {tmp_path / 'missing.png'}"]
        assert encoder.report().batches == 0


def test_an_item_that_the_model_refuses_is_an_input_error_in_its_place(qwen: Encoder) -> None:
    """Qwen2.5-VL refuses pictures more than 200 times as long as high."""
    thin = Image.new("RGB", (28 * 250, 28))
    found = qwen.encode([thin, CHELSEA], on_error="return")
    assert isinstance(found[0], InputError)
    assert isinstance(found[1], Tensor)


# ------------------------------------------------------------------ encode_each


@pytest.fixture(scope="module")
def small() -> Iterator[Encoder]:
    """Holds 64 tokens: four pictures of 112 pixels, or one of 224 with nothing else."""
    with made(config=EncoderCudaGraphConfig(token_budgets=(16, 64))) as encoder:
        yield encoder


def alone(encoder: Encoder, sources: Sequence[Any]) -> list[Tensor]:
    return [stock_rows(encoder, source) for source in sources]


def assert_features(found: Sequence[Encoded], expected: Sequence[Tensor]) -> None:
    for entry, rows in zip(found, expected, strict=True):
        assert entry.error is None
        assert entry.features is not None
        assert_close(entry.features, rows)


def test_batches_of_encode_each_fill_the_largest_budget(small: Encoder) -> None:
    pictures = [square(112, seed) for seed in range(10)]
    before = small.report()
    found = list(small.encode_each(pictures))
    after = small.report()
    assert [entry.index for entry in found] == list(range(10))
    assert [entry.batch_size for entry in found] == [4] * 8 + [2] * 2
    assert_features(found, alone(small, pictures))
    assert sum(after.replays["vision"].values()) - sum(before.replays["vision"].values()) == 3
    assert after.eager == before.eager
    for entry in found:
        assert entry.item is not None
        assert entry.item.num_tokens == 16
        assert entry.item.modality is Modality.IMAGE
        assert entry.plan is not None
        assert entry.plan.all_replayed
        assert entry.batch_seconds > 0
        assert entry.source.startswith("<PIL image 112x112")


def test_an_item_over_the_cap_runs_alone_and_eagerly_between_replays(small: Encoder) -> None:
    sides = [112, 112, 448, 448, 112, 224, 112]
    pictures = [square(side, seed) for seed, side in enumerate(sides)]
    found = list(small.encode_each(pictures))
    assert [entry.index for entry in found] == list(range(7))
    assert [entry.batch_size for entry in found] == [2, 2, 1, 1, 1, 1, 1]
    steps = [entry.plan.steps["vision"] if entry.plan else None for entry in found]
    assert [isinstance(step, Eager) for step in steps] == [False, False, True, True, False, False, False]
    assert {step.reason for step in steps if isinstance(step, Eager)} == {Reason.OVER_LARGEST_BUDGET}
    assert_features(found, alone(small, pictures))


def test_errors_of_encode_each_come_in_place_and_the_rest_goes_on(small: Encoder, tmp_path: Path) -> None:
    missing = tmp_path / "missing.png"
    sources: list[Any] = [missing, square(112, 0), square(112, 1), b"nothing", missing, square(112, 2)]
    found = list(small.encode_each(sources))
    assert [entry.index for entry in found] == list(range(6))
    assert [entry.error is not None for entry in found] == [True, False, False, True, True, False]
    assert all((entry.features is None) == (entry.error is not None) for entry in found)
    assert found[0].source == str(missing)
    assert found[0].plan is None
    good = [entry for entry in found if entry.error is None]
    assert_features(good, alone(small, [sources[entry.index] for entry in good]))


def test_encode_each_takes_any_iterable_reads_each_source_once_and_yields_as_it_goes(small: Encoder) -> None:
    taken: list[int] = []

    def endless() -> Iterator[Image.Image]:
        for seed in range(1_000):
            taken.append(seed)
            yield square(112, seed)

    results = small.encode_each(endless())
    first = [next(results) for _ in range(8)]
    assert [entry.index for entry in first] == list(range(8))
    assert taken == list(range(len(taken)))
    assert len(taken) <= 9, "a batch is read, and the source that opens the next one; no more"


def test_encode_each_of_nothing_is_nothing(small: Encoder) -> None:
    assert list(small.encode_each([])) == []


def test_more_items_than_the_bound_open_another_batch() -> None:
    config = EncoderCudaGraphConfig(token_budgets=(64,), max_items_per_batch=3)
    with made(config=config) as encoder:
        found = list(encoder.encode_each([square(56, seed) for seed in range(7)]))
        assert [entry.batch_size for entry in found] == [3, 3, 3, 3, 3, 3, 1]
        assert encoder.report().eager == {"vision": {}}


def test_encode_each_mixes_images_and_videos(photo_encoder: Encoder, clips: tuple[Path, Path]) -> None:
    sources = [clips[0], CHELSEA, clips[1], ASTRONAUT]
    found = list(photo_encoder.encode_each(sources))
    assert [entry.index for entry in found] == [0, 1, 2, 3]
    assert_features(found, alone(photo_encoder, sources))
    assert found[0].item is not None
    assert found[0].item.modality is Modality.VIDEO


# ------------------------------------------------------------------ results


def test_results_are_the_callers_own(encoder: Encoder) -> None:
    first_inputs, second_inputs = example(encoder, seed=0, layout=-1), example(encoder, seed=1, layout=-1)
    first = encoder.encode_inputs(**first_inputs)
    kept = [rows.clone() for rows in first]
    second = encoder.encode_inputs(**second_inputs)
    assert_same(first, kept)
    assert not any(encoder.manager.owns(rows) for rows in (*first, *second))
    for rows in second:
        rows.fill_(torch.nan)
    assert_same(encoder.encode_inputs(**first_inputs), kept)
    assert_same(first, kept)


def test_eager_results_are_the_callers_own() -> None:
    with made(config=EncoderCudaGraphConfig(token_budgets=(16,))) as encoder:
        inputs = example(encoder)
        pixels = inputs["pixel_values"].clone()
        first = encoder.encode_inputs(**inputs)
        kept = [rows.clone() for rows in first]
        for rows in encoder.encode_inputs(**inputs):
            rows.fill_(torch.nan)
        assert_same(encoder.encode_inputs(**inputs), kept)
        assert_same(first, kept)
        assert torch.equal(inputs["pixel_values"], pixels)
        assert encoder.report().eager == {"vision": {Reason.OVER_LARGEST_BUDGET.value: 3}}


def test_inputs_are_not_changed(encoder: Encoder) -> None:
    inputs = example(encoder)
    before = {name: value.clone() for name, value in inputs.items()}
    encoder.encode_inputs(**inputs)
    assert_same(list(inputs.values()), list(before.values()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_pixels_of_another_dtype_are_converted_to_the_models(encoder: Encoder, dtype: torch.dtype) -> None:
    inputs = example(encoder)
    converted = {**inputs, "pixel_values": inputs["pixel_values"].to(dtype)}
    plain_inputs = {**inputs, "pixel_values": inputs["pixel_values"].to(dtype).float()}
    assert_close(torch.cat(encoder.encode_inputs(**converted)), plain(encoder, plain_inputs))


def test_pixels_that_are_not_contiguous_are_read_right(encoder: Encoder) -> None:
    inputs = example(encoder)
    strided = {**inputs, "pixel_values": inputs["pixel_values"].mT.contiguous().mT}
    assert not strided["pixel_values"].is_contiguous()
    assert_same(encoder.encode_inputs(**strided), encoder.encode_inputs(**inputs))


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [*((name, torch.bfloat16) for name in sorted(TINY)), ("lfm2_vl", torch.float16)],
    ids=str,
)
def test_in_half_precision_the_error_is_that_of_plain_transformers(model_type: str, dtype: torch.dtype) -> None:
    """The half-precision rule of `checking`: at most 1.1 times plain's error against float32, by norm."""
    with made(model_type, dtype=dtype) as encoder:
        inputs = example(encoder, tokens=64)
        found = encoder.encode_inputs(**inputs)
        assert {rows.dtype for rows in found} == {dtype}
        exact = plain_features(encoder.adapter, copy.deepcopy(encoder.adapter.model).float(), inputs).double()
        ours, theirs = (
            (rows.double() - exact).norm() / exact.norm() for rows in (torch.cat(found), plain(encoder, inputs))
        )
        assert ours <= HALF_RATIO * theirs
        assert sum(encoder.report().replays["vision"].values()) == 1


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(torch.inference_mode, id="inference_mode"),
        pytest.param(torch.no_grad, id="no_grad"),
        pytest.param(lambda: torch.autocast("cpu", torch.bfloat16), id="autocast"),
    ],
)
def test_the_callers_mode_changes_no_bit(encoder: Encoder, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    inputs = example(encoder)
    expected = encoder.encode_inputs(**inputs)
    with mode():
        assert_same(encoder.encode_inputs(**inputs), expected)
    assert_same(encoder.encode_inputs(**inputs), expected)
    assert not any(rows.requires_grad for rows in expected)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("internvl", {}),
        ("lfm2_vl", {"backend": "traced"}),
        ("qwen2_5_vl", {"optimize": ("patch_embedding", "aligned_mlp")}),
    ],
    ids=str,
)
def test_an_encoder_made_in_inference_mode_works_outside_and_the_other_way_round(
    model_type: str, options: dict[str, Any]
) -> None:
    config = EncoderCudaGraphConfig(token_budgets=(16,), **options)
    with torch.inference_mode():
        encoder = made(model_type, config)
        inputs = example(encoder, tokens=16)
    with encoder, made(model_type, config) as outside:
        found = encoder.encode_inputs(**inputs)
        with torch.inference_mode():
            assert_same(outside.encode_inputs(**inputs), found)
            assert_same(encoder.encode_inputs(**inputs), found)


# ------------------------------------------------------------------ the model stays the user's


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [*((name, torch.float32) for name in sorted(TINY)), ("lfm2_vl", torch.bfloat16)],
    ids=str,
)
def test_the_users_model_is_bit_for_bit_what_it_was(model_type: str, dtype: torch.dtype) -> None:
    model = whole_model(model_type, dtype)
    adapter = adapter_for(model)
    inputs = dict(adapter.example_inputs(adapter.layouts("vision", 64, 8)[-1][1], torch.Generator().manual_seed(0)))
    expected = plain_features(adapter, model.model, inputs)  # transformers notes on modules that its hooks are there
    configs = [model.config, *(module.config for module in model.modules() if hasattr(module, "config"))]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    implementations = [config._attn_implementation for config in configs]
    needs_grad = [parameter.requires_grad for parameter in model.parameters()]
    written = model.config.to_json_string()
    with Encoder(model, CONFIG) as encoder:
        encoder.encode_inputs(**inputs)
        assert_same([plain(encoder, inputs)], [expected])
    assert_same([plain(encoder, inputs)], [expected])
    assert [config._attn_implementation for config in configs] == implementations
    assert model.config.to_json_string() == written
    assert [parameter.requires_grad for parameter in model.parameters()] == needs_grad
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


REWRITES = ("patch_embedding", "aligned_mlp")
"""Those that run without CUDA graphs; under CUDA graphs they are on by default."""


def rewriting(model: Any, *budgets: int) -> Encoder:
    return Encoder(model, EncoderCudaGraphConfig(token_budgets=budgets, optimize=REWRITES))


def test_with_rewrites_the_users_model_is_right_meanwhile_and_bit_for_bit_what_it_was_afterwards(
    tmp_path: Path,
) -> None:
    model = whole_model("qwen2_5_vl")
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    strides = [parameter.stride() for parameter in model.parameters()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = dict(adapter_for(model).example_inputs([Grid(1, 16, 16)], torch.Generator().manual_seed(0)))
    expected = plain_features(adapter_for(model), model.model, inputs)
    with rewriting(model, 64) as encoder:
        assert_close(torch.cat(encoder.encode_inputs(**inputs)), expected)
        assert_close(plain(encoder, inputs), expected)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        model.save_pretrained(tmp_path)
    assert_same([plain(encoder, inputs)], [expected])
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_with_rewrites_two_encoders_of_one_model_do_not_disturb_each_other() -> None:
    """Nor does the end of the one: under CUDA graphs the second would read memory that was given back."""
    model = whole_model("qwen2_5_vl")
    first, second = rewriting(model, 16), rewriting(model, 16)
    replayed, eager = example(first, tokens=16), example(first, tokens=20)
    for both in (replayed, eager):
        for encoder in (first, second):
            assert_close(torch.cat(encoder.encode_inputs(**both)), plain(encoder, both))
    random_weights_(model.model, first.adapter.parts, seed=1)
    for both in (replayed, eager):
        for encoder in (first, second):
            assert_close(torch.cat(encoder.encode_inputs(**both)), plain(encoder, both))
    first.close()
    for both in (replayed, eager):
        assert_close(torch.cat(second.encode_inputs(**both)), plain(second, both))
    second.close()


def test_with_rewrites_a_forward_that_the_user_put_on_a_module_is_there_afterwards() -> None:
    """As `accelerate.hooks` does for models spread over devices: `module.forward` is an instance attribute."""
    model = whole_model("qwen2_5_vl")
    module = model.model.visual.patch_embed
    stock = module.forward
    module.forward = hooked = lambda hidden: stock(hidden)
    with rewriting(model, 16) as encoder:
        encoder.encode_inputs(**example(encoder, tokens=16))
        assert vars(module).get("forward") is hooked
    assert vars(module).get("forward") is hooked


def test_two_encoders_of_one_model_do_not_disturb_each_other(encoder: Encoder) -> None:
    model = encoder.adapter.model
    with Encoder(model, EncoderCudaGraphConfig(token_budgets=(64,))) as second:
        inputs = example(encoder)
        expected = encoder.encode_inputs(**inputs)
        assert_same(second.encode_inputs(**inputs), expected)
    assert_same(encoder.encode_inputs(**inputs), expected)


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_weights_changed_in_place_are_obeyed(model_type: str) -> None:
    with made(model_type, EncoderCudaGraphConfig(token_budgets=(16,))) as encoder:
        inputs = example(encoder, tokens=16)
        before = torch.cat(encoder.encode_inputs(**inputs))
        random_weights_(encoder.adapter.model, encoder.adapter.parts, seed=1)
        found = torch.cat(encoder.encode_inputs(**inputs))
        assert_close(found, plain(encoder, inputs))
        assert not torch.equal(found, before)


def _converted(encoder: Encoder) -> None:
    encoder.adapter.model.to(torch.bfloat16)


def _first_replaced(encoder: Encoder) -> None:
    weight = encoder.adapter.weight
    weight.data = weight.data * 2


@pytest.mark.parametrize("move", [_converted, _first_replaced])
@pytest.mark.parametrize("model_type", sorted(TINY))
def test_weights_moved_after_capture_are_refused_never_silently_wrong(
    model_type: str, move: Callable[[Encoder], None]
) -> None:
    """A CUDA graph keeps reading the old addresses, whose memory somebody else may own by now."""
    with made(model_type, EncoderCudaGraphConfig(token_budgets=(16,))) as encoder:
        inputs = example(encoder, tokens=16)
        encoder.encode_inputs(**inputs)
        move(encoder)
        with pytest.raises(OnereplayError, match="weights were moved"):
            encoder.encode_inputs(**inputs)
    with Encoder(encoder.adapter.model, EncoderCudaGraphConfig(token_budgets=(8,))) as again:
        assert torch.cat(again.encode_inputs(**inputs)).isfinite().all()


# ------------------------------------------------------------------ counters


def test_the_report_counts_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    config = EncoderCudaGraphConfig(token_budgets=(64, 256), max_items_per_batch=4)
    with caplog.at_level(logging.INFO, "onereplay"), made(config=config) as encoder:
        grids: list[list[Grid]] = [
            [Grid(1, 8, 8)],  # 16 tokens of 64
            [Grid(1, 16, 16), Grid(1, 8, 8)],  # 80 of 256
            [Grid(1, 8, 8)],
            [Grid(1, 4, 4)] * 5,  # too many items, 20 tokens
            [Grid(1, 2, 2 * 257)],  # over 256, by one token
            [Grid(1, 2, 2 * 257)],
        ]
        for batch in grids:
            encoder.encode_inputs(**encoder.adapter.example_inputs(batch, torch.Generator().manual_seed(0)))
        encoder.encode_inputs()
        report = encoder.report()
        assert (report.batches, report.items) == (6, 11)
        assert report.replays == {"vision": {64: 2, 256: 1}}
        assert report.eager == {
            "vision": {Reason.TOO_MANY_ITEMS.value: 1, Reason.OVER_LARGEST_BUDGET.value: 2},
        }
        assert (report.replayed_tokens, report.padding_tokens, report.eager_tokens) == (112, 48 + 176 + 48, 534)
        assert report.padding_fraction == 272 / 384
        assert "2 eager, over the largest budget" in str(report)
        logged = [record.getMessage() for record in caplog.records if "an eager forward" in record.getMessage()]
        assert len(logged) == 2, "the first of each reason is logged"
        assert report.capture.budgets == {"vision": (64, 256)}
        assert report.capture.static_bytes > 0


def test_the_plan_says_what_encode_will_do_and_runs_nothing(encoder: Encoder) -> None:
    batch = encoder.adapter.batch(**example(encoder))
    before = encoder.report()
    step = encoder.manager.plan(batch).steps["vision"]
    assert isinstance(step, Replay)
    assert step.capacity.tokens == 64
    assert encoder.report() == before


@pytest.mark.parametrize("model_type", WITH_PHOTOS)
def test_the_planner_without_weights_foretells_the_items_of_the_encoder(
    model_type: str, clips: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(model_type) as encoder, monkeypatch.context() as patch:
        fail_on_weights(patch)
        preprocessor, capacities = planner(f"preset:{TINY[model_type]}", CONFIG)
        assert {path: tuple(ladder) for path, ladder in capacities.items()} == encoder.manager.capacities
        for source in (ASTRONAUT, CHELSEA, *clips):
            item, text = preprocessor.item(source)
            assert (item,) == encoder.preprocessor.batch(source).items
            assert text


# ------------------------------------------------------------------ threads


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_two_threads_on_one_encoder_get_their_own_results(model_type: str) -> None:
    """200 batches, replayed and eager ones, bit for bit as from one thread."""
    with made(model_type, EncoderCudaGraphConfig(token_budgets=(8, 16), backend="traced")) as encoder:
        inputs = [example(encoder, tokens, seed) for tokens in (8, 12, 20) for seed in (0, 1)]
        expected = [encoder.encode_inputs(**each) for each in inputs]
        wrong: list[str] = []

        def work(thread: int) -> None:
            for turn in range(100):
                index = (turn * (thread + 1) + thread) % len(inputs)
                try:
                    found = encoder.encode_inputs(**inputs[index])
                    same = all(torch.equal(a, b) for a, b in zip(found, expected[index], strict=True))
                    wrong.extend([] if same else [f"thread {thread}, batch {turn}"])
                except Exception as error:  # shown by the main thread
                    wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert encoder.report().batches == 200 + len(inputs)


def test_the_stock_model_in_another_thread_is_undisturbed() -> None:
    """An encode switches the tower's attention for its own forward only; a plain call at that time is still right."""
    model = whole_model("qwen2_5_vl")
    with Encoder(model, EncoderCudaGraphConfig(token_budgets=(16,))) as encoder:
        inputs = example(encoder, tokens=64)  # eager: Python runs, and the switch is on for most of the time
        expected = plain(encoder, inputs)
        stop = threading.Event()

        def encode() -> None:
            while not stop.is_set():
                encoder.encode_inputs(**inputs)

        thread = threading.Thread(target=encode)
        thread.start()
        try:
            found = [plain(encoder, inputs) for _ in range(25)]
        finally:
            stop.set()
            thread.join()
        for rows in found:
            assert_close(rows, expected)


# ------------------------------------------------------------------ the end


def test_a_closed_encoder_says_so_and_closing_again_does_nothing() -> None:
    encoder = made()
    inputs = example(encoder)
    kept = encoder.encode_inputs(**inputs)
    copies = [rows.clone() for rows in kept]
    encoder.close()
    encoder.close()
    for call in (
        lambda: encoder.encode([CHELSEA]),
        lambda: encoder.encode_inputs(**inputs),
        lambda: list(encoder.encode_each([CHELSEA])),
    ):
        with pytest.raises(ClosedError, match="the encoder was closed; make a new one"):
            call()
    assert encoder.report().batches == 1
    assert_same(kept, copies)


def test_the_context_manager_closes_after_an_error_too() -> None:
    encoder = made()

    def fail_inside() -> None:
        with encoder:
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    with pytest.raises(ClosedError):
        encoder.encode_inputs(**example(encoder))


def test_a_closed_encoder_leaves_its_model_to_the_next() -> None:
    model = whole_model("internvl")
    inputs: dict[str, Any] | None = None
    features = []
    for _ in range(2):
        with Encoder(model, CONFIG) as encoder:
            inputs = inputs or example(encoder)
            features.append(encoder.encode_inputs(**inputs))
    assert_same(*features)
