"""Streams and threads: batches share static buffers, so each waits for the one before, wherever it was enqueued."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from onereplay import EncoderCudaGraphConfig
from onereplay.core.staging import TURNS
from onereplay.encoder import Encoder
from tests.gpu.conftest import MODELS, NOT_COMPILED, assert_as_right_as_plain, assert_same, inputs_of, keep_busy, made

Batches = list[tuple[dict[str, Any], list[Tensor]]]


@pytest.fixture(scope="module")
def batches(encoder: Encoder) -> Batches:
    """Batches of several budgets with their results from a serial run."""
    inputs = [inputs_of(encoder, tokens, seed) for tokens in (64, 128, 256) for seed in (0, 1)]
    found = [(each, encoder.encode_inputs(**each)) for each in inputs]
    torch.cuda.synchronize()
    return found


def test_two_threads_on_two_streams_get_their_own_results(encoder: Encoder, batches: Batches) -> None:
    """100 batches a thread, bit for bit as in a serial run."""
    wrong: list[str] = []

    def work(thread: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                found = [
                    (turn, index, encoder.encode_inputs(**batches[index][0]))
                    for turn in range(100)
                    for index in [(turn * (thread + 1) + thread) % len(batches)]
                ]
            stream.synchronize()
            for turn, index, rows in found:
                if not all(torch.equal(a, b) for a, b in zip(rows, batches[index][1], strict=True)):
                    wrong.append(f"thread {thread}, batch {turn}")
        except Exception as error:  # shown by the main thread
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_second_stream_reads_a_result_while_the_next_batches_run(encoder: Encoder, batches: Batches) -> None:
    inputs, expected = batches[0]
    other, _ = batches[1]
    side = torch.cuda.Stream()
    first = encoder.encode_inputs(**inputs)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        keep_busy()
        copies = [rows.clone() for rows in first]
    later = [encoder.encode_inputs(**other) for _ in range(10)]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    assert_same(copies, expected)
    assert_same(first, expected)
    for rows in later:
        assert_same(rows, batches[1][1])


def test_a_batch_of_another_stream_waits_for_the_one_that_is_not_through(encoder: Encoder, batches: Batches) -> None:
    """Batches of one budget, so of one graph: the second must not load its pixels under the first one's replay."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for turn, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            keep_busy(20)
            found.append((turn % 2, encoder.encode_inputs(**batches[turn % 2][0])))
    torch.cuda.synchronize()
    for index, rows in found:
        assert_same(rows, batches[index][1])


def test_20_batches_enqueued_without_waiting_are_as_in_a_serial_run(encoder: Encoder) -> None:
    """The device is busy, so copies out of the pinned blocks are late; there are fewer blocks than batches."""
    assert TURNS < 20
    inputs = [inputs_of(encoder, (64, 128)[seed % 2], seed) for seed in range(20)]
    expected = []
    for each in inputs:
        expected.append(encoder.encode_inputs(**each))
        torch.cuda.synchronize()
    keep_busy()
    found = [encoder.encode_inputs(**each) for each in inputs]
    torch.cuda.synchronize()
    for rows, before in zip(found, expected, strict=True):
        assert_same(rows, before)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("tokens", [64, 260], ids=["replay", "eager"])
def test_the_caller_may_reuse_its_pixels_as_soon_as_encode_returns(encoder: Encoder, tokens: int, pinned: bool) -> None:
    inputs = inputs_of(encoder, tokens)
    expected = encoder.encode_inputs(**inputs)
    pixels = inputs["pixel_values"].to(encoder.dtype)  # no conversion on the way
    inputs["pixel_values"] = pixels.pin_memory() if pinned else pixels
    torch.cuda.synchronize()
    keep_busy()
    found = encoder.encode_inputs(**inputs)
    inputs["pixel_values"].fill_(torch.nan)
    torch.cuda.synchronize()
    assert_same(found, expected)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(torch.inference_mode, id="inference_mode"),
        pytest.param(torch.enable_grad, id="enable_grad"),
        pytest.param(lambda: torch.autocast("cuda", torch.float16), id="autocast"),
    ],
)
@pytest.mark.parametrize("tokens", [64, 260], ids=["replay", "eager"])
def test_the_callers_mode_changes_no_bit(
    encoder: Encoder, tokens: int, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    inputs = inputs_of(encoder, tokens)
    expected = encoder.encode_inputs(**inputs)
    with mode():
        found = encoder.encode_inputs(**inputs)
    assert_same(found, expected)
    assert not any(rows.requires_grad for rows in found)
    assert {rows.dtype for rows in found} == {torch.bfloat16}
    assert_same(encoder.encode_inputs(**inputs), expected)


@pytest.mark.parametrize("model_type", MODELS)
def test_an_encoder_made_in_inference_mode_on_a_side_stream_works_outside(model_type: str) -> None:
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream), torch.autocast("cuda", torch.float16):
        encoder = made(model_type, 64)
    with encoder:
        for tokens in (64, 68):
            inputs = inputs_of(encoder, tokens)
            assert_as_right_as_plain(encoder, encoder.encode_inputs(**inputs), inputs)


def test_two_encoders_of_one_model_do_not_disturb_each_other() -> None:
    """Nor does the end of the one; with rewrites, which change where weights lie."""
    with made("qwen2_5_vl", 64) as source:
        model = source.adapter.model
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="cuda", optimize=NOT_COMPILED)
    first, second = Encoder(model, config), Encoder(model, config)
    for tokens in (64, 68):
        inputs = inputs_of(first, tokens)
        for each in (first, second):
            assert_as_right_as_plain(each, each.encode_inputs(**inputs), inputs)
    first.close()
    sizes = [2**exponent for exponent in range(6, 20)] * 100
    trash = [torch.full((size,), torch.nan, device="cuda") for size in sizes]  # whatever was freed is NaN now
    for tokens in (64, 68):
        inputs = inputs_of(second, tokens)
        assert_as_right_as_plain(second, second.encode_inputs(**inputs), inputs)
    del trash
    second.close()


@pytest.mark.parametrize("move", ["to", "data"])
def test_weights_moved_after_capture_are_refused_never_silently_wrong(move: str) -> None:
    with made("lfm2_vl", 64) as encoder:
        inputs = inputs_of(encoder, 64)
        encoder.encode_inputs(**inputs)
        if move == "to":
            encoder.adapter.model.to(torch.float16)
        else:
            weight = encoder.adapter.weight
            weight.data = weight.data.clone()
        with pytest.raises(Exception, match="weights were moved"):
            encoder.encode_inputs(**inputs)


@pytest.mark.parametrize("model_type", MODELS)
def test_weights_changed_in_place_are_obeyed(model_type: str) -> None:
    with made(model_type, 64) as encoder:
        inputs = inputs_of(encoder, 64)
        encoder.encode_inputs(**inputs)
        with torch.no_grad():
            for parameter in encoder.adapter.model.parameters():
                parameter.mul_(1.25)
        assert_as_right_as_plain(encoder, encoder.encode_inputs(**inputs), inputs)
