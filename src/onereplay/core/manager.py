"""The life of a batch: items, plan, pack, load, replay or eager, assemble."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.buffers import Buffers, Layout, Packed
from onereplay.core.graphs import Graph, GraphBackend, make_backend
from onereplay.core.plan import Capacity, Eager, Plan, Reason, Replay, plan
from onereplay.core.protocol import BatchT, PathSpec, SupportsEncoderCudaGraph
from onereplay.core.staging import Block, Staging, exact_buffers
from onereplay.core.stats import CaptureReport, Report, Stats
from onereplay.errors import CaptureError, ClosedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Captured:
    """One captured graph of a path."""

    layout: Layout
    graph: Graph
    outputs: tuple[Tensor, ...]


class _Path:
    """What one path owns: static input and output buffers of the largest capacity, staging, graphs by capacity."""

    def __init__(
        self, spec: PathSpec, capacities: Sequence[Capacity], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.layouts = [Layout(spec.buffers, capacity, padded=True) for capacity in capacities]
        self.block = Block(self.layouts, dtype, device)
        self.staging = Staging(self.layouts, dtype, device)
        with torch.inference_mode(False):
            self.outputs = tuple(
                torch.zeros(_most(output.unit, capacities), *output.shape, dtype=output.dtype or dtype, device=device)
                for output in spec.outputs
            )
        self.graphs: dict[Capacity, _Captured] = {}
        self.pending: set[Capacity] = set()
        """Capacities that are recorded when a batch first needs them."""
        self.addresses = [tensor.data_ptr() for tensor in self._static()]

    def _static(self) -> list[Tensor]:
        return [*self.block.tensors(), *self.outputs]

    def static_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._static())

    def poison(self) -> None:
        for tensor in (*self.block.staged.values(), *self.outputs):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        self.block.metadata.fill_(255)

    def owns(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(static.untyped_storage().data_ptr() == storage for static in self._static())

    def prefixes(self, capacity: Capacity) -> tuple[Tensor, ...]:
        """The part of each output buffer that a capacity uses."""
        return tuple(
            tensor[: getattr(capacity, output.unit)]
            for tensor, output in zip(self.outputs, self.spec.outputs, strict=True)
        )

    def assert_addresses(self) -> None:
        """A graph reads and writes fixed addresses; nothing may have replaced a static buffer."""
        assert self.addresses == [tensor.data_ptr() for tensor in self._static()], "a static buffer was moved"


class EncoderCudaGraphManager(Generic[BatchT]):
    """Runs one encoder by one rule: a batch is one replay of the smallest captured budget that holds it, or one eager
    forward.

    Thread-safe: batches take turns, and each caller gets fresh tensors of its own. On a CUDA device work is enqueued in
    the caller's current stream; batches of different streams wait for each other on the device.

    Args:
        adapter: the model.
        config: what to capture; checked before this is called.

    Example::

        with EncoderCudaGraphManager(adapter, config) as manager:
            manager.capture()
            features = manager.encode(batch)      # one tensor an item
    """

    def __init__(self, adapter: SupportsEncoderCudaGraph[BatchT], config: EncoderCudaGraphConfig | None = None) -> None:
        self.adapter = adapter
        self.config = config or EncoderCudaGraphConfig()
        self.device, self.dtype = adapter.device, adapter.dtype
        self._specs = dict(adapter.paths())
        self._ladders = {path: tuple(adapter.capacities(path, self.config)) for path in self._specs}
        self._backend: GraphBackend = make_backend(self.config.backend, self.device)
        self._paths: dict[str, _Path] = {}
        self._capacities: dict[str, tuple[Capacity, ...]] = dict.fromkeys(self._specs, ())
        self._dropped: dict[str, list[int]] = {path: [] for path in self._specs}
        self._stats = Stats(tuple(self._specs))
        self._lock = threading.RLock()
        self._order = _StreamOrder(self.device)
        self._closed = False
        self._seconds = 0.0
        self._weight_addresses: list[int] = []

    @property
    def capacities(self) -> dict[str, tuple[Capacity, ...]]:
        """Capacities that can be replayed, by path, ascending; empty before `capture` and if every capture failed."""
        return dict(self._capacities)

    def _refresh_capacities(self) -> None:
        for path, owner in self._paths.items():
            usable = owner.graphs.keys() | owner.pending
            self._capacities[path] = tuple(capacity for capacity in self._ladders[path] if capacity in usable)

    # ------------------------------------------------------------------ capture

    def capture(self) -> CaptureReport:
        """Capture every budget of every path, largest first; calling again does nothing.

        A budget whose capture fails (out of memory too) is dropped, logged and counted; the others work.

        Raises:
            ClosedError: the manager was closed.
        """
        with self._lock:
            self._assert_open()
            if not self._paths:
                self._capture_all()
            return self._stats.capture

    def _capture_all(self) -> None:
        start = time.perf_counter()
        steps = [(path, capacity) for path in self._specs for capacity in reversed(self._ladders[path])]
        with self._device_work():
            self._paths = {
                path: _Path(spec, self._ladders[path], self.dtype, self.device)
                for path, spec in self._specs.items()
                if self._ladders[path]
            }
            if self._backend.on_first_use:
                for path, capacity in steps:
                    self._paths[path].pending.add(capacity)
            else:
                for path, capacity in _progress(steps, "capturing"):
                    self._try_capture(path, capacity)
        self._seconds = time.perf_counter() - start
        self._weight_addresses = [weight.data_ptr() for weight in self.adapter.weights]
        self._note_capture()
        logger.info("%s", self._stats.capture)

    def _note_capture(self) -> None:
        self._refresh_capacities()
        self._stats.capture = CaptureReport(
            backend=self._backend.name,
            budgets={path: tuple(c.tokens for c in usable) for path, usable in self.capacities.items()},
            dropped={path: tuple(sorted(budgets)) for path, budgets in self._dropped.items() if budgets},
            seconds=self._seconds,
            static_bytes=sum(path.static_bytes() for path in self._paths.values()),
            pool_bytes=self._backend.pool_bytes(),
            pinned_bytes=sum(path.staging.pinned_bytes() for path in self._paths.values()),
        )

    def _assert_weights_in_place(self) -> None:
        """A graph reads its weights where they were at capture."""
        if self._weight_addresses and self._weight_addresses != [w.data_ptr() for w in self.adapter.weights]:
            raise ClosedError(
                "the model's weights were moved after capture (.to(), .half(), new parameters, or another encoder of "
                "the model with other rewrites); close this encoder, or restore() what accelerate gave, and make a new "
                "one"
            )

    def _try_capture(self, path: str, capacity: Capacity) -> None:
        """Capture one budget, or drop it with a warning."""
        owner = self._paths[path]
        owner.pending.discard(capacity)
        try:
            owner.graphs[capacity] = self._capture_one(path, capacity)
        except (CaptureError, RuntimeError) as error:
            self._dropped[path].append(capacity.tokens)
            logger.warning(
                "path %r: budget %d is dropped, its capture failed: %s: %s; batches that need it use a larger one or "
                "run eagerly",
                path,
                capacity.tokens,
                type(error).__name__,
                str(error).partition("\n")[0],
            )

    def _capture_one(self, path: str, capacity: Capacity) -> _Captured:
        owner = self._paths[path]
        layout = next(layout for layout in owner.layouts if layout.capacity == capacity)
        bounds = layout.bounds()
        owner.staging.load(Packed.empty(owner.spec.buffers), layout, owner.block)
        buffers = layout.buffers(owner.block.metadata, owner.block.staged)

        def forward(*tensors: Tensor) -> Sequence[Tensor]:
            named = Buffers(dict(zip(buffers, tensors, strict=True)))
            return self.adapter.forward(path, named, bounds)

        outputs = owner.prefixes(capacity)
        return _Captured(layout, self._backend.capture(forward, list(buffers.values()), outputs), outputs)

    # ------------------------------------------------------------------ encode

    def plan(self, batch: BatchT) -> Plan:
        """What `encode` would do with the batch; runs nothing."""
        return plan(batch.items, self.capacities)

    def encode(self, batch: BatchT) -> list[Tensor]:
        """One tensor an item, in the batch's order, that the caller owns: `(tokens, hidden)` in the model's dtype.

        Raises:
            ClosedError: the manager was closed, or the weights were moved after capture.
        """
        if not batch.items:
            return []
        with self._lock, self._device_work():
            self._assert_open()
            self._assert_weights_in_place()
            steps = self._ready_plan(batch)
            rows = {path: self._run(path, steps, batch) for path in steps.steps}
            self._stats.count(steps, len(batch.items))
            return self.adapter.assemble(rows, batch)

    def _ready_plan(self, batch: BatchT) -> Plan:
        """The plan, once every graph that it replays is recorded; a capture that fails now changes the plan."""
        while True:
            steps = self.plan(batch)
            pending = [
                (path, step.capacity)
                for path, step in steps.steps.items()
                if isinstance(step, Replay) and step.capacity in self._paths[path].pending
            ]
            if not pending:
                return steps
            start = time.perf_counter()
            for path, capacity in pending:
                self._try_capture(path, capacity)
            self._seconds += time.perf_counter() - start
            self._note_capture()

    def _run(self, path: str, steps: Plan, batch: BatchT) -> Sequence[Tensor]:
        """The path's real rows, one fresh tensor for each declared output."""
        packed = self.adapter.pack(path, batch)
        demand = steps.demands[path]
        match steps.steps[path]:
            case Replay(capacity):
                return self._replay(self._paths[path], capacity, packed, demand)
            case Eager():
                return self._eager(path, packed, demand)

    def _replay(self, path: _Path, capacity: Capacity, packed: Packed, demand: Capacity) -> Sequence[Tensor]:
        captured = path.graphs[capacity]
        path.assert_addresses()
        path.staging.load(packed, captured.layout, path.block)
        captured.graph.replay()
        return [
            tensor[: getattr(demand, output.unit)].clone()
            for tensor, output in zip(captured.outputs, path.spec.outputs, strict=True)
        ]

    def _eager(self, path: str, packed: Packed, demand: Capacity) -> Sequence[Tensor]:
        """The same `forward`, on buffers of exactly the batch's size."""
        layout = Layout(packed.as_they_come(self._specs[path].buffers), demand, padded=False)
        buffers = exact_buffers(packed, layout, self.dtype, self.device)
        return self.adapter.forward(path, buffers, layout.bounds())

    # ------------------------------------------------------------------ life

    def count_outside(self, reason: Reason, detail: str) -> None:
        """Count a batch that the caller ran without this manager, and why; its tokens are not known here."""
        with self._lock:
            for path in self._specs:
                self._stats.count_eager(path, Eager(reason, detail), tokens=0)

    def poison(self) -> None:
        """Fill every static buffer with NaN, and metadata with ones: whatever a batch fails to write then shows."""
        with self._lock, self._device_work():
            for path in self._paths.values():
                path.poison()

    def owns(self, tensor: Tensor) -> bool:
        """True if the tensor lies in a static buffer; no result ever does."""
        return any(path.owns(tensor) for path in self._paths.values())

    def report(self) -> Report:
        """What was done so far."""
        with self._lock:
            return self._stats.report()

    def close(self) -> None:
        """Give back graphs, static buffers and the pool. The model stays as it was; calling again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._order.synchronize()
            self._paths = {}
            self._capacities = dict.fromkeys(self._specs, ())
            self._backend.close()

    @contextmanager
    def _device_work(self) -> Iterator[None]:
        """Run on the encoder's device, behind the batch before, without gradients and without the caller's autocast."""
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False), _on(self.device), self._order:
            yield

    def _assert_open(self) -> None:
        if self._closed:
            raise ClosedError("the encoder was closed; make a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _most(unit: str, capacities: Iterable[Capacity]) -> int:
    sizes: list[int] = [getattr(capacity, unit) for capacity in capacities]
    return max(sizes)


T = TypeVar("T")


def _progress(steps: Sequence[T], title: str) -> Iterable[T]:
    """The steps, with a progress bar on standard error where that is a terminal."""
    console = Console(stderr=True)
    return track(steps, title, console=console, transient=True, disable=not console.is_terminal)


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _StreamOrder:
    """Batches share static buffers, so on the device each waits for the one before, whatever their streams are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def __exit__(self, *exc: object) -> None:
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait on the host until the last batch is through."""
        if self._done is not None:
            self._done.synchronize()
