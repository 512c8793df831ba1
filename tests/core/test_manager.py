"""The life of a batch, with a model small enough to check by hand (`tests/core/dummy.py`).

TOLERANCE bounds what float32 may differ from the loops in float64: a sequence has at most 256 patches, so its mean is
off by at most 256 * 2**-24 of the mean size of its entries (below 1), times the sum of a column of the 6x6 weight
(below 6), times the two rows of a token: 1.9e-4. A row of another sequence or budget differs by more than 1e-2.
"""

import copy
import functools
import gc
import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import onereplay.core.manager as manager_module
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.buffers import Buffers
from onereplay.core.graphs import Forward, Graph, TracedGraphs
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.errors import CaptureError, ClosedError
from tests.core.dummy import MERGE, DummyAdapter, DummyBatch, Picture, batch_of, both, picture

TOLERANCE = 2e-4
Manager = EncoderCudaGraphManager[DummyBatch]


def config(*budgets: int, backend: str = "traced", max_items: int | None = None) -> EncoderCudaGraphConfig:
    return EncoderCudaGraphConfig(token_budgets=budgets or (8, 16, 32), backend=backend, max_items_per_batch=max_items)


def captured(adapter: DummyAdapter, options: EncoderCudaGraphConfig | None = None) -> Manager:
    manager = EncoderCudaGraphManager(adapter, options or config())
    manager.capture()
    return manager


def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def assert_right(adapter: DummyAdapter, batch: DummyBatch, results: Sequence[Tensor]) -> None:
    expected = adapter.expected(batch)
    assert len(results) == len(expected)
    for result, right in zip(results, expected, strict=True):
        assert result.dtype == adapter.dtype
        torch.testing.assert_close(result.double(), right, rtol=0, atol=TOLERANCE)


class CountingGraphs(TracedGraphs):
    """Traced graphs that count what really runs."""

    def __init__(self, *, on_first_use: bool = False) -> None:
        super().__init__(on_first_use=on_first_use)
        self.captures: list[int] = []
        self.replays: list[int] = []
        self.closed = 0

    def capture(self, forward: Forward, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Graph:
        self.captures.append(len(outputs[0]))
        return _CountingGraph(super().capture(forward, inputs, outputs), self.replays, len(outputs[0]))

    def close(self) -> None:
        self.closed += 1


class _CountingGraph:
    def __init__(self, graph: Graph, replays: list[int], tokens: int) -> None:
        self._graph, self._replays, self._tokens = graph, replays, tokens

    def replay(self) -> None:
        self._replays.append(self._tokens)
        self._graph.replay()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CountingGraphs:
    backend = CountingGraphs()
    monkeypatch.setattr(manager_module, "make_backend", lambda name, device: backend)
    return backend


@pytest.fixture
def lazy_graphs(monkeypatch: pytest.MonkeyPatch) -> CountingGraphs:
    backend = CountingGraphs(on_first_use=True)
    monkeypatch.setattr(manager_module, "make_backend", lambda name, device: backend)
    return backend


# ------------------------------------------------------------------ results

batches = st.lists(
    st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=6
)  # tokens of each sequence of each item: from below the smallest budget to above the largest


@functools.cache
def shared() -> tuple[DummyAdapter, Manager]:
    """One manager for all examples, so each batch finds the buffers as others left them."""
    adapter = DummyAdapter()
    return adapter, captured(adapter)


@settings(max_examples=50, deadline=None)
@given(batches, st.integers(0, 1000))
def test_every_batch_gives_what_each_sequence_gives_alone(items: list[list[int]], seed: int) -> None:
    adapter, manager = shared()
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of(*(picture(generator, *tokens) for tokens in items))
    results = manager.encode(batch)
    assert [len(result) for result in results] == [sum(tokens) for tokens in items]
    assert_right(adapter, batch, results)


@settings(max_examples=50, deadline=None)
@given(batches)
def test_replay_and_eager_agree(items: list[list[int]]) -> None:
    batch = batch_of(*(picture(random(), *tokens) for tokens in items))
    adapter, manager = shared()
    eager = EncoderCudaGraphManager(adapter, config())
    assert eager.plan(batch).steps == {"main": Eager(Reason.NOT_CAPTURED)}
    for replayed, alone in zip(manager.encode(batch), eager.encode(batch), strict=True):
        assert replayed.dtype == alone.dtype
        torch.testing.assert_close(replayed, alone, rtol=0, atol=TOLERANCE)


def test_a_batch_at_each_edge_of_each_budget_is_right_and_replays_the_smallest() -> None:
    adapter = DummyAdapter()
    manager = captured(adapter)
    for tokens, budget in [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, None)]:
        batch = batch_of(picture(random(), tokens))
        step = manager.plan(batch).steps["main"]
        assert (step.capacity.tokens if isinstance(step, Replay) else None) == budget
        assert_right(adapter, batch, manager.encode(batch))


def test_nan_and_garbage_in_every_static_buffer_do_not_leak() -> None:
    adapter = DummyAdapter()
    manager = captured(adapter)
    path = manager._paths["main"]
    for tokens in ([32], [20, 4], [1], [8], [3]):
        manager.poison()
        assert all(tensor.isnan().all() for tensor in (*path.block.staged.values(), *path.outputs))
        assert (path.block.metadata == 0xFF).all()
        batch = batch_of(*(picture(random(), n) for n in tokens))
        assert isinstance(manager.plan(batch).steps["main"], Replay)
        assert_right(adapter, batch, manager.encode(batch))
        assert all(rows.isfinite().all() for rows in adapter.rows["main"])


def test_a_manager_owns_its_static_buffers_and_no_result() -> None:
    manager = captured(DummyAdapter(), config(8))
    path = manager._paths["main"]
    for static in (*path.block.tensors(), *path.outputs):
        assert manager.owns(static)
        assert manager.owns(static[1:])
    assert not any(manager.owns(result) for n in (3, 9) for result in manager.encode(batch_of(picture(random(), n))))


def test_results_share_no_memory_with_a_static_buffer_or_an_input() -> None:
    adapter = DummyAdapter()
    manager = captured(adapter)
    path = manager._paths["main"]
    static = {tensor.untyped_storage().data_ptr() for tensor in (*path.block.tensors(), *path.outputs)}
    for tokens in (5, 33):
        batch = batch_of(picture(random(), tokens))
        inputs = {part.untyped_storage().data_ptr() for part in batch.pictures[0].sequences["main"]}
        for tensor in (*manager.encode(batch), *adapter.rows["main"]):
            assert tensor.untyped_storage().data_ptr() not in static | inputs


def test_results_survive_a_hundred_later_batches_bit_for_bit() -> None:
    adapter = DummyAdapter()
    manager = captured(adapter, config(8))
    kept = [*manager.encode(batch_of(picture(random(), 3), picture(random(), 4))), *adapter.rows["main"]]
    before = copy.deepcopy(kept)
    generator = torch.Generator().manual_seed(7)
    for _ in range(100):
        manager.encode(batch_of(picture(generator, 5), picture(generator, 2)))
    for now, then in zip(kept, before, strict=True):
        assert torch.equal(now, then)


def test_the_callers_inputs_stay_as_they_were() -> None:
    manager = captured(DummyAdapter(), config(8))
    batch = batch_of(picture(random(), 3), picture(random(), 4))
    before = copy.deepcopy([part for each in batch.pictures for part in each.sequences["main"]])
    manager.encode(batch)
    after = [part for each in batch.pictures for part in each.sequences["main"]]
    assert all(torch.equal(now, then) for now, then in zip(after, before, strict=True))


def test_an_empty_batch_is_an_empty_list() -> None:
    manager = captured(DummyAdapter(), config(8))
    assert manager.encode(batch_of()) == []
    assert manager.report().batches == 0


def test_pixels_of_another_type_are_converted() -> None:
    adapter = DummyAdapter()
    batch = batch_of(picture(random(), 3, 4, dtype=torch.float64))
    assert_right(adapter, batch, captured(adapter, config(8)).encode(batch))


# ------------------------------------------------------------------ one replay


def test_a_batch_is_one_replay_of_its_budget_and_nothing_else(graphs: CountingGraphs) -> None:
    adapter = DummyAdapter()
    manager = captured(adapter)
    adapter.forwards.clear()
    for items, replayed in [([3], [8]), ([3, 3, 3], [16]), ([1] * 32, [32]), ([16, 1], [32])]:
        graphs.replays.clear()
        manager.encode(batch_of(*(picture(random(), tokens) for tokens in items)))
        assert graphs.replays == replayed
    assert adapter.forwards == []


def test_a_batch_over_the_largest_budget_is_one_forward_of_its_exact_size(graphs: CountingGraphs) -> None:
    adapter = DummyAdapter()
    manager = captured(adapter)
    adapter.forwards.clear()
    manager.encode(batch_of(picture(random(), 30), picture(random(), 3)))
    assert graphs.replays == []
    assert adapter.forwards == [("main", 33 * MERGE)]


def test_an_eager_forward_sees_the_batch_and_no_padding() -> None:
    seen: list[dict[str, Tensor]] = []
    adapter = DummyAdapter(before_forward=lambda path, buffers: seen.append(dict(buffers)))
    manager = EncoderCudaGraphManager(adapter, config())
    batch = batch_of(picture(random(), 3, 5), picture(random(), 2))
    manager.encode(batch)
    pixels = torch.cat([part for each in batch.pictures for part in each.sequences["main"]])
    assert torch.equal(seen[0]["pixels"], pixels)
    assert seen[0]["cu_seqlens"].tolist() == [0, 6, 16, 20]
    assert seen[0]["places"].tolist() == [*range(1, 7), *range(1, 11), *range(1, 5)]
    assert seen[0]["order"].tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 9, 8]


def test_nine_items_with_a_bound_of_eight_are_one_eager_forward_of_nine(graphs: CountingGraphs) -> None:
    adapter = DummyAdapter()
    manager = captured(adapter, config(32, max_items=8))
    adapter.forwards.clear()
    batch = batch_of(*(picture(random(), 2) for _ in range(9)))
    assert_right(adapter, batch, manager.encode(batch))
    assert (graphs.replays, adapter.forwards) == ([], [("main", 18 * MERGE)])
    assert manager.report().eager == {"main": {"too many items": 1}}


def test_more_sequences_than_a_graph_holds_run_eagerly_and_right(graphs: CountingGraphs) -> None:
    adapter = DummyAdapter(sequence_slots=2)
    manager = captured(adapter, config(32))
    batch = batch_of(picture(random(), *[1] * 9))
    assert_right(adapter, batch, manager.encode(batch))
    assert graphs.replays == []
    assert manager.report().eager == {"main": {"too many sequences": 1}}


def test_an_unsupported_item_takes_the_whole_batch_eager(graphs: CountingGraphs) -> None:
    adapter = DummyAdapter()
    manager = captured(adapter, config(8))
    odd = Picture(picture(random(), 2).sequences, unsupported="odd")
    batch = batch_of(picture(random(), 2), odd)
    assert_right(adapter, batch, manager.encode(batch))
    assert graphs.replays == []
    assert manager.report().eager == {"main": {"unsupported input": 1}}


def two_paths() -> DummyAdapter:
    return DummyAdapter(names=("global", "local"))


def test_each_path_of_a_batch_is_replayed_once(graphs: CountingGraphs) -> None:
    adapter = two_paths()
    manager = captured(adapter)
    batch = batch_of(
        both(picture(random(), 3, path="global"), picture(random(), 20, path="local")),
        picture(random(), 4, path="global"),
        both(picture(random(), 1, path="global"), picture(random(), 2, 5, path="local")),
    )
    assert_right(adapter, batch, manager.encode(batch))
    assert graphs.replays == [8, 32]
    assert manager.report().replays == {"global": {8: 1}, "local": {32: 1}}


@pytest.mark.parametrize("path", ["global", "local"])
def test_a_path_that_nobody_uses_is_not_replayed(path: str, graphs: CountingGraphs) -> None:
    adapter = two_paths()
    manager = captured(adapter)
    batch = batch_of(picture(random(), 3, path=path), picture(random(), 9, path=path))
    assert_right(adapter, batch, manager.encode(batch))
    assert graphs.replays == [16]
    assert set(adapter.rows) == {path}


def test_one_path_may_replay_while_another_is_eager(graphs: CountingGraphs) -> None:
    adapter = two_paths()
    manager = captured(adapter)
    adapter.forwards.clear()
    batch = batch_of(both(picture(random(), 3, path="global"), picture(random(), 40, path="local")))
    assert_right(adapter, batch, manager.encode(batch))
    assert graphs.replays == [8]
    assert adapter.forwards == [("local", 40 * MERGE)]


# ------------------------------------------------------------------ capture


def test_capture_goes_from_the_largest_to_the_smallest_once(graphs: CountingGraphs) -> None:
    manager = captured(DummyAdapter(), config(8, 16, 16, 32))
    assert graphs.captures == [32, 16, 8]
    assert manager.capture() is manager.report().capture
    assert graphs.captures == [32, 16, 8]
    assert [capacity.tokens for capacity in manager.capacities["main"]] == [8, 16, 32]


def test_on_first_use_only_what_a_batch_needs_is_captured(lazy_graphs: CountingGraphs) -> None:
    adapter = DummyAdapter()
    manager = captured(adapter)
    assert lazy_graphs.captures == []
    for tokens in (10, 12, 3):
        batch = batch_of(picture(random(), tokens))
        assert_right(adapter, batch, manager.encode(batch))
    assert lazy_graphs.captures == [16, 8]
    assert lazy_graphs.replays == [16, 16, 8]


ERRORS = [torch.OutOfMemoryError("no memory left"), CaptureError("an operation"), RuntimeError("cudaErrorUnknown")]


def failing_at(*budgets: int, error: Exception) -> Callable[[str, Buffers], None]:
    """Fails while these budgets are captured; an eager forward of the same size works."""

    def before_forward(path: str, buffers: Buffers) -> None:
        if isinstance(buffers.pixels, FakeTensor) and len(buffers.pixels) in [budget * MERGE for budget in budgets]:
            raise error

    return before_forward


@pytest.mark.parametrize("backend", ["traced", "auto"], ids=["at the start", "on first use"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_budget_whose_capture_fails_is_dropped_logged_and_counted_and_the_others_work(
    error: Exception, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = DummyAdapter(before_forward=failing_at(16, 64, error=error))
    manager = captured(adapter, config(8, 16, 32, 64, backend=backend))
    for _ in range(3):
        for tokens in (5, 12, 30, 40):
            batch = batch_of(picture(random(), tokens))
            assert_right(adapter, batch, manager.encode(batch))
    report = manager.report()
    assert report.replays == {"main": {8: 3, 32: 6}}
    assert report.eager == {"main": {"over the largest budget": 3}}
    dropped = [record.getMessage() for record in caplog.records if "is dropped" in record.message]
    assert len(dropped) == 2
    for budget in (16, 64):
        assert any(
            f"budget {budget} is dropped" in message and type(error).__name__ in message and str(error) in message
            for message in dropped
        )
    assert [capacity.tokens for capacity in manager.capacities["main"]] == [8, 32]
    assert report.capture.dropped == {"main": (16, 64)}
    assert report.capture.budgets == {"main": (8, 32)}
    assert "2 dropped" in str(report)


@pytest.mark.parametrize("backend", ["traced", "auto"], ids=["at the start", "on first use"])
def test_a_budget_dropped_in_one_path_is_kept_in_another(backend: str) -> None:
    def before_forward(path: str, buffers: Buffers) -> None:
        if path == "local" and isinstance(buffers.pixels, FakeTensor) and len(buffers.pixels) == 16 * MERGE:
            raise RuntimeError("no memory left")

    adapter = DummyAdapter(names=("global", "local"), before_forward=before_forward)
    manager = captured(adapter, config(backend=backend))
    batch = batch_of(both(picture(random(), 12, path="global"), picture(random(), 12, path="local")))
    assert_right(adapter, batch, manager.encode(batch))
    assert manager.report().replays == {"global": {16: 1}, "local": {32: 1}}


@pytest.mark.parametrize("backend", ["traced", "auto"], ids=["at the start", "on first use"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_when_every_capture_fails_eager_is_right(error: Exception, backend: str) -> None:
    adapter = DummyAdapter(before_forward=failing_at(8, 16, 32, error=error))
    manager = captured(adapter, config(backend=backend))
    for tokens in (3, 12, 32):
        batch = batch_of(picture(random(), tokens))
        assert_right(adapter, batch, manager.encode(batch))
    report = manager.report()
    assert report.eager["main"][Reason.NOT_CAPTURED.value] >= 1
    assert sum(report.eager["main"].values()) == 3
    assert report.replays == {"main": {}}
    assert manager.plan(batch_of(picture(random(), 3))).steps == {"main": Eager(Reason.NOT_CAPTURED)}


def test_a_forward_that_reads_data_is_dropped_with_the_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def before_forward(path: str, buffers: Buffers) -> None:
        int(buffers.cu_seqlens[1])

    adapter = DummyAdapter(before_forward=before_forward)
    manager = captured(adapter, config(8))
    assert "int(buffers.cu_seqlens[1])" in caplog.text
    batch = batch_of(picture(random(), 3))
    assert_right(adapter, batch, manager.encode(batch))
    assert manager.report().eager == {"main": {Reason.NOT_CAPTURED.value: 1}}


def test_before_capture_every_batch_is_eager_and_right() -> None:
    adapter = DummyAdapter()
    manager = EncoderCudaGraphManager(adapter, config())
    batch = batch_of(picture(random(), 3))
    assert_right(adapter, batch, manager.encode(batch))
    assert manager.report().eager == {"main": {Reason.NOT_CAPTURED.value: 1}}


def test_buffers_of_36_budgets_are_as_large_as_those_of_the_largest_alone() -> None:
    many = EncoderCudaGraphManager(DummyAdapter(), EncoderCudaGraphConfig(backend="auto")).capture()
    one = EncoderCudaGraphManager(DummyAdapter(), config(5120, backend="auto")).capture()
    assert len(many.budgets["main"]) == 36
    assert many.budgets["main"][-1] == 5120
    assert 0 < one.static_bytes <= many.static_bytes <= 1.1 * one.static_bytes


# ------------------------------------------------------------------ fixed addresses


@pytest.mark.parametrize("which", ["metadata", "pixels", "features", "squares"])
def test_a_moved_static_buffer_is_caught_before_the_replay(which: str, graphs: CountingGraphs) -> None:
    manager = captured(DummyAdapter(), config(8))
    path = manager._paths["main"]
    if which == "metadata":
        path.block.metadata = path.block.metadata.clone()
    elif which == "pixels":
        path.block.staged[which] = path.block.staged[which].clone()
    else:
        path.outputs = tuple(
            tensor.clone() if name == which else tensor
            for name, tensor in zip(("features", "squares"), path.outputs, strict=True)
        )
    with pytest.raises(AssertionError, match="a static buffer was moved"):
        manager.encode(batch_of(picture(random(), 3)))
    assert graphs.replays == []


def test_a_hundred_batches_move_no_static_buffer() -> None:
    manager = captured(DummyAdapter())
    path = manager._paths["main"]
    before = [tensor.data_ptr() for tensor in (*path.block.tensors(), *path.outputs)]
    for tokens in itertools.islice(itertools.cycle(range(1, 40)), 100):
        manager.encode(batch_of(picture(random(), tokens)))
    assert [tensor.data_ptr() for tensor in (*path.block.tensors(), *path.outputs)] == before


# ------------------------------------------------------------------ weights


def test_a_replay_after_the_weights_were_moved_gives_an_error_and_is_not_counted(graphs: CountingGraphs) -> None:
    adapter = DummyAdapter()
    manager = captured(adapter, config(8))
    adapter.weight.data = adapter.weight.data.clone()
    for tokens in (3, 40):
        with pytest.raises(ClosedError, match="weights were moved"):
            manager.encode(batch_of(picture(random(), tokens)))
    assert manager.report().batches == 0


def test_what_a_graph_reads_is_held_until_the_end() -> None:
    """The check runs beside the replay, which therefore must not find its weights freed."""
    adapter = DummyAdapter()
    manager = captured(adapter, config(8))
    (held,) = manager._weights
    before = adapter.weight.data_ptr()
    adapter.weight.data = torch.zeros_like(adapter.weight)
    assert held.data_ptr() == before
    assert held.any()
    manager.close()
    assert manager._weights == []


def test_a_failure_that_moved_weights_explain_is_told_as_that() -> None:
    adapter = DummyAdapter()
    manager = captured(adapter, config(8))
    adapter.weight.data = adapter.weight.data.double()
    with pytest.raises(ClosedError, match="weights were moved"):
        manager.encode(batch_of(picture(random(), 3)))


# ------------------------------------------------------------------ the caller's modes

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("backend", ["traced", "auto"], ids=["at the start", "on first use"])
@pytest.mark.parametrize("when", ["capturing", "encoding"])
@pytest.mark.parametrize("mode", MODES)
def test_the_callers_autocast_and_grad_mode_do_not_change_results(mode: str, when: str, backend: str) -> None:
    adapter = DummyAdapter()
    manager = EncoderCudaGraphManager(adapter, config(8, 16, backend=backend))
    batches = [batch_of(picture(random(), tokens)) for tokens in (5, 12, 40)]
    with MODES[mode]() if when == "capturing" else torch.enable_grad():
        manager.capture()
        manager.encode(batches[0])
    with MODES[mode]() if when == "encoding" else torch.enable_grad():
        results = [manager.encode(batch)[0] for batch in batches]
    again = [manager.encode(batch)[0] for batch in batches]
    for result, plain, batch in zip(results, again, batches, strict=True):
        assert not result.requires_grad
        assert torch.equal(result, plain)
        assert_right(adapter, batch, [result])
    assert manager.report().replays == {"main": {8: 3, 16: 2}}


# ------------------------------------------------------------------ threads


@pytest.mark.parametrize("backend", ["traced", "auto"], ids=["at the start", "on first use"])
def test_two_threads_get_their_own_results(backend: str) -> None:
    adapter = DummyAdapter()
    manager = captured(adapter, config(backend=backend))
    faults: list[BaseException] = []
    start = threading.Barrier(2)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            start.wait()
            for turn in range(100):
                batch = batch_of(picture(generator, 1 + turn % 9), picture(generator, 1 + (turn * seed) % 30))
                assert_right(adapter, batch, manager.encode(batch))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[0]
    assert manager.report().batches == 200


# ------------------------------------------------------------------ report and log


def test_the_report_counts_replays_by_budget_eager_by_reason_and_padding() -> None:
    manager = captured(DummyAdapter(), config(8, 16, max_items=4))
    for items in ([5], [3, 4], [8], [9, 1], [17], [20], [1] * 5):
        manager.encode(batch_of(*(picture(random(), tokens) for tokens in items)))
    report = manager.report()
    assert (report.batches, report.items) == (7, 13)
    assert report.replays == {"main": {8: 3, 16: 1}}
    assert report.eager == {"main": {"over the largest budget": 2, "too many items": 1}}
    assert report.replayed_tokens == 5 + 7 + 8 + 10
    assert report.padding_tokens == 3 + 1 + 0 + 6
    assert report.eager_tokens == 17 + 20 + 5
    assert report.padding_fraction == 10 / 40
    assert report.to_dict()["padding_fraction"] == 10 / 40
    text = str(report)
    assert "7 batches, 13 items" in text
    assert "main: 4 replays (8: 3, 16: 1)" in text
    assert "main: 2 eager, over the largest budget" in text
    assert "30 tokens replayed with 25.0% padding, 42 eager" in text


def test_a_report_is_a_snapshot() -> None:
    manager = captured(DummyAdapter(), config(8))
    before = manager.report()
    manager.encode(batch_of(picture(random(), 3)))
    assert before.batches == 0
    assert before.replays == {"main": {}}


def test_a_batch_that_ran_elsewhere_is_counted_and_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    manager = captured(DummyAdapter(), config(8))
    for _ in range(2):
        manager.count_outside(Reason.UNSUPPORTED_INPUT, "attentions were asked for")
    assert manager.report().eager == {"main": {"unsupported input": 2}}
    assert manager.report().eager_tokens == 0
    assert [record.getMessage() for record in caplog.records if "eager" in record.message] == [
        "path 'main': an eager forward, unsupported input (attentions were asked for); logged once a reason"
    ]


def test_a_batch_that_raises_is_not_counted_and_the_next_ones_work() -> None:
    adapter = DummyAdapter()
    manager = captured(adapter, config(8))

    def before_forward(path: str, buffers: Buffers) -> None:
        raise ZeroDivisionError

    adapter.before_forward = before_forward
    with pytest.raises(ZeroDivisionError):
        manager.encode(batch_of(picture(random(), 40)))
    adapter.before_forward = lambda path, buffers: None
    assert manager.report().batches == 0
    for tokens in (4, 40):
        batch = batch_of(picture(random(), tokens))
        assert_right(adapter, batch, manager.encode(batch))


def test_the_first_eager_forward_of_each_reason_is_logged_with_its_cause_and_only_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = captured(DummyAdapter(), config(8, max_items=2))
    caplog.clear()
    for items in ([3], [9], [30], [1, 1, 1], [2, 2, 2], [12]):
        manager.encode(batch_of(*(picture(random(), tokens) for tokens in items)))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "path 'main': an eager forward, over the largest budget (9 tokens > 8" in warnings[0]
    assert "path 'main': an eager forward, too many items (3 items > 2)" in warnings[1]


def test_each_path_logs_its_own_first_eager_forward(caplog: pytest.LogCaptureFixture) -> None:
    manager = captured(two_paths(), config(8))
    for path in ("global", "local", "global", "local"):
        manager.encode(batch_of(picture(random(), 9, path=path)))
    logged = Counter(
        path for record in caplog.records for path in ("global", "local") if f"'{path}': an eager" in record.message
    )
    assert logged == {"global": 1, "local": 1}


def test_a_replay_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    manager = captured(DummyAdapter(), config(8))
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        manager.encode(batch_of(picture(random(), 3)))
    assert not [record for record in caplog.records if record.name.startswith("onereplay")]


# ------------------------------------------------------------------ closing


def test_a_closed_manager_refuses_to_encode_and_to_capture_but_reports(graphs: CountingGraphs) -> None:
    manager = captured(DummyAdapter(), config(8))
    manager.encode(batch_of(picture(random(), 3)))
    manager.close()
    with pytest.raises(ClosedError, match="make a new one"):
        manager.encode(batch_of(picture(random(), 3)))
    with pytest.raises(ClosedError):
        manager.capture()
    assert manager.capacities == {"main": ()}
    assert manager.report().batches == 1


def test_closing_twice_closes_once(graphs: CountingGraphs) -> None:
    manager = captured(DummyAdapter(), config(8))
    manager.close()
    manager.close()
    assert graphs.closed == 1


def test_leaving_the_with_block_closes_also_after_an_error(graphs: CountingGraphs) -> None:
    manager = EncoderCudaGraphManager(DummyAdapter(), config())
    with pytest.raises(KeyError), manager:
        raise KeyError
    assert graphs.closed == 1
    with pytest.raises(ClosedError):
        manager.capture()


def test_closing_frees_every_static_buffer() -> None:
    manager = captured(DummyAdapter(), config(8))
    manager.encode(batch_of(picture(random(), 3)))
    path = manager._paths["main"]
    static = [weakref.ref(tensor) for tensor in (*path.block.tensors(), *path.outputs)]
    del path
    assert all(tensor() is not None for tensor in static)
    manager.close()
    gc.collect()
    assert all(tensor() is None for tensor in static)


def test_closing_leaves_results_and_the_model_whole() -> None:
    adapter = DummyAdapter()
    batch = batch_of(picture(random(), 3))
    with EncoderCudaGraphManager(adapter, config(8)) as manager:
        manager.capture()
        results = manager.encode(batch)
    assert_right(adapter, batch, results)
    again = captured(adapter, config(8))
    assert_right(adapter, batch, again.encode(batch))
