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
from onereplay.errors import CapacityError, CaptureError, ClosedError

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
        self._device_index: int | None = None
        self._done: torch.cuda.Event | None = None
        """The last batch is through; None where there is no device to wait for."""
        if self.device.type == "cuda":
            self._device_index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self._done = torch.cuda.Event()
        self._has_autocast = torch.amp.is_autocast_available(self.device.type)
        self._closed = False
        self._seconds = 0.0
        self._weights: list[Tensor] = []
        """What the graphs read. Held, so that a replay after the model moved its weights reads no freed memory."""
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
        self._weights = [weight.detach() for weight in self.adapter.weights]
        self._weight_addresses = [weight.data_ptr() for weight in self._weights]
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
        if self._weights and self._weight_addresses != list(map(Tensor.data_ptr, self.adapter.weights)):
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
        with self._lock, self._device_work() as stream:
            self._assert_open()
            steps = self._ready_plan(batch)
            try:
                rows = {path: self._run(path, steps, batch, stream) for path in steps.steps}
            finally:  # while the device works: hundreds of addresses take as long as all before the launch
                self._assert_weights_in_place()
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
            self._assert_weights_in_place()
            start = time.perf_counter()
            for path, capacity in pending:
                self._try_capture(path, capacity)
            self._seconds += time.perf_counter() - start
            self._note_capture()

    def _run(self, path: str, steps: Plan, batch: BatchT, stream: torch.cuda.Stream | None) -> Sequence[Tensor]:
        """The path's real rows, one fresh tensor for each declared output."""
        packed = self.adapter.pack(path, batch)
        demand = steps.demands[path]
        match steps.steps[path]:
            case Replay(capacity):
                return self._replay(self._paths[path], capacity, packed, demand, stream)
            case Eager():
                return self._eager(path, packed, demand)

    def _replay(
        self, path: _Path, capacity: Capacity, packed: Packed, demand: Capacity, stream: torch.cuda.Stream | None
    ) -> Sequence[Tensor]:
        captured = path.graphs[capacity]
        path.assert_addresses()
        path.staging.load(packed, captured.layout, path.block, stream)
        captured.graph.replay()
        return [
            tensor[: getattr(demand, output.unit)].clone()
            for tensor, output in zip(captured.outputs, path.spec.outputs, strict=True)
        ]

    def _eager(self, path: str, packed: Packed, demand: Capacity) -> Sequence[Tensor]:
        """The same `forward`, on buffers of exactly the batch's size."""
        if path in self._paths:
            for name, sources in packed.staged.items():
                self._paths[path].block.holds(name, sources)
        layout = Layout(packed.as_they_come(self._specs[path].buffers), demand, padded=False)
        buffers = exact_buffers(packed, layout, self.dtype, self.device)
        return self.adapter.forward(path, buffers, layout.bounds())

    @contextmanager
    def staging_area(self, rows: int, path: str | None = None, name: str = "pixels") -> Iterator[Tensor]:
        """The static buffer itself, for pixels that `encode` then need not copy.

        Write and encode within the block, in the stream that is current at its start; whoever uses another orders the
        two, as with any tensor. Other threads wait until the block ends. What the batch brings as its pixels is this
        tensor, or parts of it from its start, in order and without gaps. A batch that brings other pixels takes the
        place of what was written; what comes after that, or after the block, is refused and never read stale.

        Args:
            rows: patches of a packed model, or tiles.
            path: of the model; the first by default.
            name: of the buffer, where a path has several.

        Returns:
            `(rows, *shape)` in the model's dtype on its device; for this block, then not the caller's any more.

        Raises:
            CapacityError: no captured graph has so many rows.
            ClosedError: the manager was closed.

        Example::

            with manager.staging_area(num_patches) as pixels:
                normalize(frames, out=pixels)
                features = manager.encode(adapter.batch(pixel_values=pixels, image_grid_thw=grids))
        """
        path = next(iter(self._specs)) if path is None else path
        with self._lock, self._in_turn() as stream:
            self._assert_open()
            block = self._paths[path].block if path in self._paths else None
            room = len(block.staged[name]) if block is not None and name in block.staged else 0
            if block is None or not 0 < rows <= room:
                raise CapacityError(
                    f"rows={rows}: the captured graphs of path {path!r} have a buffer {name!r} of {room} rows; give "
                    f"encode a tensor of your own"
                )
            block.lent.add(name)
            try:
                yield block.staged[name][:rows].detach()
            finally:
                block.lent.discard(name)
                if self._done is not None:
                    self._done.wait(stream)  # a batch within the block may have run in another stream

    # ------------------------------------------------------------------ life

    def count_outside(self, reason: Reason, detail: str, paths: Iterable[str] | None = None) -> None:
        """Count a batch that the caller ran without this manager, and why; its tokens are not known here.

        Args:
            paths: that the batch would have used; all by default.
        """
        with self._lock:
            for path in self._specs if paths is None else paths:
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
            if self._done is not None:
                self._done.synchronize()
            self._paths, self._weights = {}, []
            self._capacities = dict.fromkeys(self._specs, ())
            self._backend.close()

    @contextmanager
    def _device_work(self) -> Iterator[torch.cuda.Stream | None]:
        """Run on the encoder's device, in its turn, without gradients and without the caller's autocast."""
        with torch.no_grad(), self._without_autocast(), _on(self._device_index), self._in_turn() as stream:
            yield stream

    def _without_autocast(self) -> AbstractContextManager[object]:
        if self._has_autocast and torch.is_autocast_enabled(self.device.type):
            return torch.autocast(self.device.type, enabled=False)
        return nullcontext()

    @contextmanager
    def _in_turn(self) -> Iterator[torch.cuda.Stream | None]:
        """Batches share static buffers, so on the device each waits for the one before, whatever their streams are."""
        if self._done is None:
            yield None
            return
        stream = torch.cuda.current_stream(self._device_index)
        self._done.wait(stream)
        try:
            yield stream
        finally:
            self._done.record(stream)

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


def _on(index: int | None) -> AbstractContextManager[object]:
    return nullcontext() if index is None else torch.cuda.device(index)
