"""Static memory: it stays where it is, is as large as the largest budget needs, comes back, and may run out."""

import logging
from typing import Any

import pytest
import torch

from onereplay import EncoderCudaGraphConfig
from onereplay.checking import HALF_RATIO, plain_features
from onereplay.core.plan import Replay
from onereplay.encoder import Encoder
from tests.gpu.conftest import (
    FULL,
    MIB,
    MODELS,
    assert_as_right_as_plain,
    assert_same,
    collect,
    exact_features,
    inputs_of,
    made,
    relative_error,
)


def addresses(encoder: Encoder) -> list[int]:
    return [tensor.data_ptr() for path in encoder.manager._paths.values() for tensor in path._static()]


@pytest.mark.parametrize("model_type", MODELS)
def test_static_buffers_stay_at_their_addresses_over_200_batches(model_type: str) -> None:
    with made(model_type, 64, 128) as encoder:
        before = addresses(encoder)
        assert before
        batches = [inputs_of(encoder, tokens, seed) for tokens in (64, 100, 128, 132) for seed in (0, 1)]
        for turn in range(200):
            encoder.encode_inputs(**batches[turn % len(batches)])
        assert addresses(encoder) == before
        report = encoder.report()
        assert sum(report.replays["vision"].values()) == 150
        assert sum(report.eager["vision"].values()) == 50


def test_a_static_buffer_that_was_replaced_is_caught_before_the_replay() -> None:
    with made("lfm2_vl", 64) as encoder:
        inputs = inputs_of(encoder, 64)
        expected = encoder.encode_inputs(**inputs)
        path = encoder.manager._paths["vision"]
        original = path.outputs
        path.outputs = tuple(output.clone() for output in original)
        with pytest.raises(AssertionError, match="a static buffer was moved"):
            encoder.encode_inputs(**inputs)
        path.outputs = original
        assert_same(encoder.encode_inputs(**inputs), expected)


def test_the_second_replay_of_a_graph_shows_nothing_of_the_first(encoder: Encoder) -> None:
    """Other sizes, boundaries and pixels in turn; the last is alone in a graph that was full."""
    for tokens, layout, seed in ((256, 0, 0), (256, -1, 1), (252, 0, 2), (200, -1, 3)):
        inputs = inputs_of(encoder, tokens, seed, layout)
        (step,) = encoder.manager.plan(encoder.adapter.batch(**inputs)).steps.values()
        assert isinstance(step, Replay)
        assert step.capacity.tokens == 256
        assert_as_right_as_plain(encoder, encoder.encode_inputs(**inputs), inputs)


@pytest.mark.parametrize("model_type", MODELS)
def test_memory_returns_after_close_however_many_encoders_there_were(model_type: str) -> None:
    """Compared after a first encoder, which pays for libraries and workspaces that stay; then three more."""
    with made(model_type, 64) as first:
        model = first.adapter.model
        inputs = inputs_of(first, 64)
        first.encode_inputs(**inputs)
    del first
    collect()
    reserved, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    allocated = torch.cuda.memory_allocated()
    config = EncoderCudaGraphConfig(token_budgets=(64, 1024, 4096), backend="cuda", optimize=())
    for _ in range(3):
        with Encoder(model, config) as encoder:
            capture = encoder.report().capture
            assert capture.static_bytes > 0
            assert capture.pool_bytes > 0
            assert torch.cuda.memory_allocated() - allocated >= capture.static_bytes
            encoder.encode_inputs(**inputs)
        del encoder
    collect()
    assert torch.cuda.memory_allocated() - allocated <= 4 * MIB
    assert torch.cuda.memory_reserved() - reserved <= 8 * MIB
    assert free - torch.cuda.mem_get_info()[0] <= 32 * MIB, "outside PyTorch's allocator: graphs and modules"


def test_36_budgets_take_the_memory_of_the_largest_alone() -> None:
    """Buffers and pool of a published size; 1.1 leaves room for what the allocator rounds up."""
    sizes = []
    for options in ({}, {"token_budgets": (5120,)}):
        config = EncoderCudaGraphConfig(backend="cuda", optimize=(), **options)  # type: ignore[arg-type]
        with Encoder.from_preset(FULL["lfm2_vl"], device="cuda", config=config) as encoder:
            capture = encoder.report().capture
            assert not capture.dropped
            sizes.append((len(capture.budgets["vision"]), capture.static_bytes + capture.pool_bytes))
        collect()
    (many, all_bytes), (one, largest_bytes) = sizes
    assert (many, one) == (36, 1)
    assert all_bytes <= 1.1 * largest_bytes, f"{all_bytes / MIB:.0f} MiB, the largest alone {largest_bytes / MIB:.0f}"


def test_the_largest_budget_out_of_memory_is_dropped_and_the_others_are_right(caplog: pytest.LogCaptureFixture) -> None:
    """For real: the process may take half of what the largest budget's graph needs beside the smaller ones."""
    budgets = (64, 256, 5120)
    with made("qwen2_5_vl", 64, 256, preset=FULL["qwen2_5_vl"], optimize=()) as small:
        model, small_pool = small.adapter.model, small.report().capture.pool_bytes
        inputs = inputs_of(small, 200)
        exact, plain = exact_features(small, inputs), plain_features(small.adapter, model, inputs)
    del small
    config = EncoderCudaGraphConfig(token_budgets=budgets, backend="cuda", optimize=())
    with Encoder(model, config) as whole:
        capture = whole.report().capture
        assert not capture.dropped
    del whole
    collect()

    room = capture.static_bytes + small_pool + (capture.pool_bytes - small_pool) // 2
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        with caplog.at_level(logging.WARNING, "onereplay"), Encoder(model, config) as encoder:
            assert encoder.report().capture.dropped == {"vision": (5120,)}
            assert encoder.report().capture.budgets == {"vision": (64, 256)}
            assert "budget 5120 is dropped, its capture failed: OutOfMemoryError" in caplog.text
            for _ in range(3):
                found = torch.cat(encoder.encode_inputs(**inputs))
                assert relative_error(found, exact) <= HALF_RATIO * relative_error(plain, exact)
            assert encoder.report().replays == {"vision": {256: 3}}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del encoder
    collect()
    with Encoder(model, config) as again:
        assert not again.report().capture.dropped
        found = torch.cat(again.encode_inputs(**inputs))
        assert relative_error(found, exact) <= HALF_RATIO * relative_error(plain, exact)


def _no_memory(buffers: Any) -> None:
    raise torch.OutOfMemoryError("no memory in the middle of a capture")


def _no_capture(buffers: Any) -> None:
    torch.cuda.current_stream().synchronize()


def _host_read(buffers: Any) -> None:
    int(buffers.cu_seqlens[-1])  # the line that the guard names


@pytest.mark.parametrize(
    ("call", "fail", "logged"),
    [
        pytest.param(
            0, _host_read, ["CaptureError", "_local_scalar_dense", "the line that the guard names"], id="read"
        ),
        pytest.param(1, _no_memory, ["OutOfMemoryError"], id="no memory in the warm-up"),
        pytest.param(2, _no_memory, ["OutOfMemoryError"], id="no memory in the capture"),
        pytest.param(2, _no_capture, [""], id="a synchronization in the capture"),
    ],
)
def test_a_capture_that_fails_drops_its_budget_and_leaves_the_others_right(
    call: int, fail: Any, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with made("lfm2_vl", 64) as source:
        model = source.adapter.model
    config = EncoderCudaGraphConfig(token_budgets=(64, 80, 128), backend="cuda", optimize=())
    with pytest.MonkeyPatch.context() as patch:
        adapter_class = type(source.adapter)
        stock = adapter_class.forward
        calls: list[int] = []  # 1 warms up, 2 is captured; `call` 0 is every one

        def forward(self: Any, path: str, buffers: Any, bounds: Any) -> Any:
            if len(buffers.pixels) == 80 * 4:
                calls.append(1)
                if call in (0, len(calls)):
                    fail(buffers)
            return stock(self, path, buffers, bounds)

        patch.setattr(adapter_class, "forward", forward)
        encoder = Encoder(model, config)
    with encoder:
        assert encoder.report().capture.dropped == {"vision": (80,)}
        (line,) = [r.getMessage() for r in caplog.records if "budget 80 is dropped" in r.getMessage()]
        assert all(part in line for part in logged)
        for tokens, budget in ((64, 64), (70, 128), (128, 128), (64, 64)):
            inputs = inputs_of(encoder, tokens)
            (step,) = encoder.manager.plan(encoder.adapter.batch(**inputs)).steps.values()
            assert isinstance(step, Replay)
            assert step.capacity.tokens == budget
            assert_as_right_as_plain(encoder, encoder.encode_inputs(**inputs), inputs)
    collect()
    assert torch.ones(2, device="cuda").sum().item() == 2, "the device works on"
    with Encoder(model, config) as again:
        assert not again.report().capture.dropped
