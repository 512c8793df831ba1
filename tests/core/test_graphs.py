"""Graph back ends without a GPU: a trace is as frozen as a CUDA graph, and refuses what a CUDA graph refuses.

A replay runs the same ATen operations on the same shapes, so every comparison is exact.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onereplay.attention import varlen_attention
from onereplay.core.graphs import CaptureGuard, TracedGraphs, make_backend
from onereplay.errors import CaptureError, ConfigError

CPU = torch.device("cpu")


def rows_like(output: Tensor) -> list[Tensor]:
    """One output buffer that shows when nothing was written."""
    return [torch.full_like(output, torch.nan)]


# ------------------------------------------------------------------ replay


def test_a_replay_obeys_the_buffers_new_contents() -> None:
    rows, index = torch.randn(5, 3), torch.tensor([4, 3, 2, 1, 0])
    outputs = rows_like(rows)
    graph = TracedGraphs().capture(lambda x, i: (x[i] * 2 + 1,), [rows, index], outputs)
    for _ in range(3):
        rows.normal_()
        index.copy_(torch.randperm(5))
        graph.replay()
        assert torch.equal(outputs[0], rows[index] * 2 + 1)


def test_a_replay_obeys_new_weights() -> None:
    """Weights are read at each replay, as in a CUDA graph: an update in place is seen."""
    weight, rows = torch.ones(3), torch.randn(5, 3)
    outputs = rows_like(rows)
    graph = TracedGraphs().capture(lambda x: (x * weight,), [rows], outputs)
    weight.fill_(4)
    graph.replay()
    assert torch.equal(outputs[0], rows * 4)


def test_python_values_stay_as_they_were_at_capture() -> None:
    state = {"scale": 2.0, "flip": False}

    def forward(x: Tensor) -> Sequence[Tensor]:
        scaled = x * state["scale"]
        return (-scaled if state["flip"] else scaled,)

    rows = torch.randn(5, 3)
    outputs = rows_like(rows)
    graph = TracedGraphs().capture(forward, [rows], outputs)
    state.update(scale=100.0, flip=True)
    graph.replay()
    assert torch.equal(outputs[0], rows * 2)


def test_python_does_not_run_at_a_replay() -> None:
    runs: list[int] = []

    def forward(x: Tensor) -> Sequence[Tensor]:
        runs.append(len(x))
        return (x + 1,)

    rows = torch.zeros(5)
    graph = TracedGraphs().capture(forward, [rows], rows_like(rows))
    captured = len(runs)
    graph.replay()
    assert captured == len(runs) > 0


def test_a_tensor_that_is_no_buffer_is_the_one_of_the_capture() -> None:
    """A forgotten buffer replays stale data here too, where a test can see it."""
    current = {"mask": torch.zeros(5)}
    rows = torch.randn(5)
    outputs = rows_like(rows)
    graph = TracedGraphs().capture(lambda x: (x + current["mask"],), [rows], outputs)
    current["mask"] = torch.ones(5)
    graph.replay()
    assert torch.equal(outputs[0], rows)


def test_capturing_computes_nothing_and_leaves_buffers_alone() -> None:
    rows, outputs = torch.full((5,), 7.0), [torch.full((5,), -1.0)]
    TracedGraphs().capture(lambda x: (x.add_(1),), [rows], outputs)
    assert (rows == 7).all()
    assert (outputs[0] == -1).all()


def test_a_replay_runs_on_the_buffers_themselves() -> None:
    """A forward that writes into a buffer does so at each replay, as in a CUDA graph; no copy hides it."""
    rows, outputs = torch.zeros(5), [torch.zeros(5)]
    graph = TracedGraphs().capture(lambda x: (x.add_(1) * 10,), [rows], outputs)
    for replay in (1, 2, 3):
        graph.replay()
        assert (rows == replay).all()
        assert (outputs[0] == replay * 10).all()


def test_results_are_copied_into_the_output_buffers() -> None:
    rows, outputs = torch.randn(5, 3), [torch.zeros(5, 3), torch.zeros(5)]
    addresses = [output.data_ptr() for output in outputs]
    graph = TracedGraphs().capture(lambda x: (x, x.sum(1)), [rows], outputs)
    graph.replay()
    kept = rows.clone()
    rows.zero_()
    assert [output.data_ptr() for output in outputs] == addresses
    assert torch.equal(outputs[0], kept), "an output that is an input was aliased, not copied"
    assert torch.equal(outputs[1], kept.sum(1))


def test_results_are_converted_to_the_output_buffers_type() -> None:
    rows, outputs = torch.randn(5), [torch.zeros(5, dtype=torch.bfloat16)]
    TracedGraphs().capture(lambda x: (x * 3,), [rows], outputs).replay()
    assert torch.equal(outputs[0], (rows * 3).to(torch.bfloat16))


@pytest.mark.parametrize("declared", [1, 3])
def test_another_number_of_results_than_declared_is_an_error(declared: int) -> None:
    rows = torch.randn(5)
    with pytest.raises((CaptureError, ValueError)):
        TracedGraphs().capture(lambda x: (x, x), [rows], [torch.zeros(5)] * declared).replay()


def test_a_result_of_another_shape_than_declared_is_an_error_and_not_broadcast() -> None:
    rows = torch.randn(5, 3)
    with pytest.raises((CaptureError, RuntimeError)):
        TracedGraphs().capture(lambda x: (x.sum(0, keepdim=True),), [rows], [torch.zeros(5, 3)]).replay()


def test_graphs_of_one_back_end_are_independent() -> None:
    backend, rows = TracedGraphs(), torch.randn(8)
    long, short = [torch.zeros(8)], [torch.zeros(3)]
    graphs = [
        backend.capture(lambda x: (x + 1,), [rows], long),
        backend.capture(lambda x: (x + 2,), [rows[:3]], short),
    ]
    graphs[1].replay()
    assert (long[0] == 0).all()
    assert torch.equal(short[0], rows[:3] + 2)
    graphs[0].replay()
    assert torch.equal(long[0], rows + 1)


def test_a_trace_holds_no_memory_and_closes_twice() -> None:
    backend = TracedGraphs()
    backend.capture(lambda x: (x + 1,), [torch.ones(3)], [torch.ones(3)]).replay()
    assert backend.pool_bytes() == 0
    backend.close()
    backend.close()


def test_a_traced_attention_obeys_new_offsets() -> None:
    q, k, v = torch.randn(3, 6, 2, 8).unbind(0)
    offsets, outputs = torch.tensor([0, 6, 6, 6], dtype=torch.int32), rows_like(q)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Sequence[Tensor]:
        return (varlen_attention(q, k, v, cu, 6, 0.3, "reference"),)

    graph = TracedGraphs().capture(attend, [q, k, v, offsets], outputs)
    for lengths in ([0, 2, 6, 6], [0, 1, 2, 6]):
        offsets.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(outputs[0], attend(q, k, v, offsets)[0])


# ------------------------------------------------------------------ what a graph cannot hold

Body = Callable[[Tensor, Tensor, Tensor], object]
"""Of rows `(4, 3)`, integers `(4,)` and a mask `(4,)`."""

REFUSED: dict[str, tuple[str, Body]] = {
    "item": ("_local_scalar_dense", lambda x, n, m: x * x[0, 0].item()),
    "tolist": ("_local_scalar_dense", lambda x, n, m: x.split(n.tolist())),
    "int": ("_local_scalar_dense", lambda x, n, m: x[: int(n[0])]),
    "float": ("_local_scalar_dense", lambda x, n, m: x * float(x[0, 0])),
    "bool": ("_local_scalar_dense|is_nonzero", lambda x, n, m: x if m.any() else -x),
    "range over a tensor": ("_local_scalar_dense", lambda x, n, m: range(n[3])),
    "boolean mask": ("index", lambda x, n, m: x[m]),
    "boolean mask of rows and columns": ("index", lambda x, n, m: x[x > 0]),
    "boolean mask beside an index": ("index", lambda x, n, m: x[m, 0]),
    "byte mask": ("index", lambda x, n, m: torch.ops.aten.index(x, [m.byte()])),
    "boolean index_put": ("index_put", lambda x, n, m: x.index_put((m,), torch.zeros(()))),
    "boolean index_put_": ("index_put_", lambda x, n, m: x.clone().index_put_((m,), torch.zeros(()))),
    "boolean assignment": ("index_put_", lambda x, n, m: x.clone().__setitem__(m, torch.zeros(3))),
    "nonzero": ("nonzero", lambda x, n, m: m.nonzero()),
    "where without values": ("nonzero", lambda x, n, m: torch.where(m)),
    "argwhere": ("nonzero", lambda x, n, m: torch.argwhere(m)),
    "masked_select": ("masked_select", lambda x, n, m: x.masked_select(m.unsqueeze(1))),
    "unique": ("_unique2", lambda x, n, m: n.unique()),
    "unique of rows": ("unique_dim", lambda x, n, m: x.unique(dim=0)),
    "unique_consecutive": ("unique_consecutive", lambda x, n, m: n.unique_consecutive()),
    "bincount": ("bincount", lambda x, n, m: n.bincount()),
    "equal": ("equal", lambda x, n, m: torch.equal(n, n)),
    "repeat_interleave by a tensor": ("repeat_interleave", lambda x, n, m: x.repeat_interleave(n, dim=0)),
    "repeat_interleave of a tensor": ("repeat_interleave", lambda x, n, m: torch.repeat_interleave(n)),
    "a tensor from a list": ("lift_fresh", lambda x, n, m: n + torch.tensor([1, 2, 3, 4])),
    "as_tensor of a list": ("lift_fresh", lambda x, n, m: n + torch.as_tensor([1, 2, 3, 4])),
}

ALLOWED: dict[str, Body] = {
    "integer index": lambda x, n, m: x[n],
    "integer index of two dimensions": lambda x, n, m: x[n, n % 3],
    "integer index_put": lambda x, n, m: x.clone().index_put_((n,), x),
    "slices": lambda x, n, m: x[1:, ::2],
    "argsort": lambda x, n, m: x[n.argsort()],
    "arange": lambda x, n, m: torch.arange(4) + n,
    "cumsum": lambda x, n, m: n.cumsum(0),
    "scalars": lambda x, n, m: x * 3 + torch.tensor(2.5) - torch.full((), 1.0),
    "where with values": lambda x, n, m: torch.where(m.unsqueeze(1), x, 0.0),
    "masked_fill": lambda x, n, m: x.masked_fill(m.unsqueeze(1), 0.0),
    "repeat_interleave by a number": lambda x, n, m: x.repeat_interleave(2, dim=0),
    "repeat_interleave of a known size": lambda x, n, m: torch.repeat_interleave(n, output_size=6),
    "searchsorted": lambda x, n, m: torch.searchsorted(n, n, right=True),
    "index_add": lambda x, n, m: torch.zeros(4, 3).index_add(0, n, x),
    "matrix product": lambda x, n, m: x @ x.t(),
    "change of type": lambda x, n, m: x.to(torch.bfloat16).float(),
    "change of type on the same device": lambda x, n, m: x.to(x.device, torch.bfloat16),
    "new zeros": lambda x, n, m: torch.zeros(4, 3) + x.new_ones(4, 3),
    "shape arithmetic": lambda x, n, m: x.view(x.shape[0] // 2, -1),
}


def example() -> list[Tensor]:
    return [torch.arange(12.0).view(4, 3) - 5, torch.tensor([0, 1, 2, 3]), torch.tensor([True, False, True, False])]


def traced(body: Body) -> None:
    def forward(x: Tensor, n: Tensor, m: Tensor) -> Sequence[Tensor]:
        body(x, n, m)
        return (x + 1,)

    TracedGraphs().capture(forward, example(), [torch.zeros(4, 3)])


def warmed_up(body: Body) -> None:
    """What `CudaGraphs` does before it captures, on the CPU."""
    buffers = example()
    with CaptureGuard():
        body(*buffers)


@pytest.mark.parametrize("run", [traced, warmed_up])
@pytest.mark.parametrize("name", REFUSED)
def test_capture_refuses_what_a_graph_cannot_hold_and_names_the_line(name: str, run: Callable[[Body], None]) -> None:
    operation, body = REFUSED[name]
    if name == "tolist" and run is warmed_up:
        body = lambda x, n, m: [entry.item() for entry in n]  # noqa: E731  (a list of a CPU tensor passes no dispatcher)
    with pytest.raises(CaptureError) as raised:
        run(body)
    message = str(raised.value)
    assert any(f"aten.{part}." in message for part in operation.split("|")), message
    line = body.__code__.co_firstlineno
    source = Path(__file__).read_text(encoding="utf-8").splitlines()[line - 1].strip()
    assert f"called at {__file__}:{line}: {source}" in message


@pytest.mark.parametrize("run", [traced, warmed_up])
@pytest.mark.parametrize("name", ALLOWED)
def test_capture_allows_what_a_graph_can_hold(name: str, run: Callable[[Body], None]) -> None:
    run(ALLOWED[name])


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_is_replayed_right(name: str) -> None:
    body, buffers = ALLOWED[name], example()

    def forward(x: Tensor, n: Tensor, m: Tensor) -> Sequence[Tensor]:
        result = body(x, n, m)
        assert isinstance(result, Tensor)
        return (result,)

    outputs = [torch.zeros_like(forward(*buffers)[0])]
    graph = TracedGraphs().capture(forward, buffers, outputs)
    for buffer, values in zip(
        buffers, [torch.randn(4, 3), torch.tensor([0, 0, 3, 3]), torch.tensor([False, True, True, True])], strict=True
    ):
        buffer.copy_(values)
    graph.replay()
    assert torch.equal(outputs[0], forward(*buffers)[0])


def test_a_helpers_line_is_named_not_the_forwards() -> None:
    def helper(x: Tensor) -> float:
        return x[0, 0].item()

    with pytest.raises(CaptureError, match=rf"test_graphs\.py:{helper.__code__.co_firstlineno + 1}: return x"):
        traced(lambda x, n, m: x * helper(x))


def test_a_copy_between_host_and_device_is_refused() -> None:
    """`meta` stands for the device here."""
    with CaptureGuard(), pytest.raises(CaptureError, match="copies between host and device"):
        torch.ones(3).to("meta")
    with CaptureGuard(), pytest.raises(CaptureError, match="copies between host and device"):
        torch.ones(3, device="meta").copy_(torch.ones(3))


def test_outside_a_capture_nothing_is_refused() -> None:
    with pytest.raises(CaptureError), CaptureGuard():
        torch.ones(1).item()
    assert torch.ones(1).item() == 1


# ------------------------------------------------------------------ choice of back end


def test_cuda_graphs_without_a_cuda_device_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"backend='cuda' needs a CUDA device, the encoder is on cpu; use .*traced"):
        make_backend("cuda", CPU)


@pytest.mark.parametrize(("name", "on_first_use"), [("auto", True), ("traced", False)])
def test_without_cuda_graphs_are_traced_auto_only_when_needed(name: str, on_first_use: bool) -> None:
    backend = make_backend(name, CPU)
    assert isinstance(backend, TracedGraphs)
    assert backend.name == "traced"
    assert backend.on_first_use is on_first_use


def test_traced_graphs_can_be_asked_for_on_a_cuda_device() -> None:
    assert isinstance(make_backend("traced", torch.device("cuda")), TracedGraphs)
