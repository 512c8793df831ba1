"""Graph back ends: record a function once, replay it on the same buffers. The only file that names CUDA graphs.

* `CudaGraphs`: `torch.cuda.CUDAGraph`, all graphs of a manager in one memory pool.
* `TracedGraphs`: for machines without a GPU. Capture traces the function on its buffers to an ATen graph (`make_fx` on
  fake tensors, so nothing is computed); replay runs the recorded ATen operations on those buffers. Python does not run
  again, so a value that was frozen at capture stays frozen, exactly as in a CUDA graph.

Both refuse what cannot be captured, before they capture: `CaptureGuard` names the operation and the line.
"""

import contextlib
import functools
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from onereplay.errors import CaptureError, ConfigError

Forward = Callable[..., Sequence[Tensor]]
"""A function of its buffers that returns new tensors."""


class Graph(Protocol):
    """A recorded function."""

    def replay(self) -> None:
        """Run the record: read the buffers, write the outputs. Asynchronous on a CUDA device."""
        ...


class GraphBackend(Protocol):
    """Records functions; owns what the records share."""

    name: str
    on_first_use: bool
    """Record each graph when a batch first needs it, instead of all at the start."""

    def capture(self, forward: Forward, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Graph:
        """Record `outputs[i].copy_(forward(*inputs)[i])`.

        Raises:
            CaptureError: the forward does something that no graph can hold.
            torch.OutOfMemoryError: there is no memory for this record; earlier records stay whole.
        """
        ...

    def pool_bytes(self) -> int:
        """Bytes that the records hold beside inputs, outputs and weights."""
        ...

    def close(self) -> None:
        """Give back what the records share, after the records are gone."""
        ...


def backend_name(name: str, device: torch.device) -> str:
    """`cuda` or `traced`: what `name` means on a device.

    Raises:
        ConfigError: CUDA graphs were asked for on a device that has none.
    """
    if name == "cuda" and device.type != "cuda":
        raise ConfigError(f"backend='cuda' needs a CUDA device, the encoder is on {device}; use backend='traced'")
    return ("cuda" if device.type == "cuda" else "traced") if name == "auto" else name


def make_backend(name: str, device: torch.device) -> GraphBackend:
    """The back end `name` (`auto`, `cuda` or `traced`) for a device.

    `auto` without CUDA traces each graph on first use: a trace takes seconds for a large tower, and gives no speed.

    Raises:
        ConfigError: CUDA graphs were asked for on a device that has none.
    """
    if backend_name(name, device) == "cuda":
        return CudaGraphs(device)
    return TracedGraphs(on_first_use=name == "auto")


class CudaGraphs:
    """CUDA graphs in one memory pool, captured on one side stream."""

    name = "cuda"
    on_first_use = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: list[Any] = [torch.cuda.graph_pool_handle()]
        """One, unless a capture broke; the last is in use."""
        self._stream = _side_stream(device)
        self._guarded = False

    def capture(self, forward: Forward, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Graph:
        """Warm up outside the capture (library handles, workspaces, compiled kernels), then record.

        The first capture runs under the guard, and again any that fails, so that the error names the operation.
        """
        if not self._guarded:
            gc.collect()
            self._guard(forward, inputs)
            self._guarded = True
        try:
            return self._record(forward, inputs, outputs)
        except RuntimeError as error:
            self._guarded = False  # the next one collects what this one left, and is guarded again
            if not isinstance(error, torch.OutOfMemoryError):
                self._guard(forward, inputs)
            raise

    def _guard(self, forward: Forward, inputs: Sequence[Tensor]) -> None:
        """Run once eagerly under the guard: under a dispatch mode PyTorch gives up compiling functions for good."""
        with self._on_stream(), torch.compiler.set_stance("force_eager"), CaptureGuard():
            forward(*inputs)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _record(self, forward: Forward, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Graph:
        with self._on_stream():
            forward(*inputs)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # A collection in a capture could free what must not be freed there: the objects of other graphs.
        with no_garbage_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pools[-1], capture_error_mode="thread_local")
            try:
                _copy_results(forward(*inputs), outputs)
            except BaseException:
                self._abandon(graph)
                raise
            self._finish(graph)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph

    def _finish(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._leave_pool()
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that the next one finds stream and pool as it expects them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph is empty, say
            try:
                graph.capture_end()
            except RuntimeError:
                self._leave_pool()

    def _leave_pool(self) -> None:
        """Go on in a new pool. PyTorch up to 2.12 leaves a pool recording when a forbidden call broke the capture: the
        device's allocator can be told to end that, the host's cannot."""
        with contextlib.suppress(RuntimeError):  # newer versions have ended it
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pools[-1])
        self._pools.append(torch.cuda.graph_pool_handle())

    def pool_bytes(self) -> int:
        """Bytes of the memory segments that belong to the pool."""
        pools = {tuple(pool) for pool in self._pools}
        segments = torch.cuda.memory_snapshot()
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) in pools)

    def close(self) -> None:
        """Return the pool's memory to the device."""
        torch.cuda.empty_cache()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python collects no garbage inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: libraries keep a workspace a stream (cuBLAS 32 MiB) for good."""
    return torch.cuda.Stream(device)


class TracedGraphs:
    """Graphs of ATen operations, run by torch.fx. Works on any device, holds no memory between replays."""

    name = "traced"

    def __init__(self, *, on_first_use: bool = False) -> None:
        self.on_first_use = on_first_use

    def capture(self, forward: Forward, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Graph:
        """Trace on fake tensors of the inputs' shapes; weights and other captured tensors stay real."""

        def guarded(*buffers: Tensor) -> tuple[Tensor, ...]:
            with CaptureGuard():
                return tuple(forward(*buffers))

        trace = make_fx(guarded, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        return _Trace(trace, inputs, outputs)

    def pool_bytes(self) -> int:
        """Nothing is held between replays."""
        return 0

    def close(self) -> None:
        """Nothing is shared."""


class _Trace:
    def __init__(
        self, recorded: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        self._recorded, self._inputs, self._outputs = recorded, inputs, outputs

    def replay(self) -> None:
        _copy_results(self._recorded(*self._inputs), self._outputs)


def _copy_results(results: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for result, output in zip(results, outputs, strict=True):
        if result.shape != output.shape:
            raise CaptureError(f"forward gives {tuple(result.shape)} where {tuple(output.shape)} is declared")
        output.copy_(result)


class CaptureGuard(TorchDispatchMode):
    """Refuses, by name and line, operations that a CUDA graph cannot hold.

    They are those that read the device on the host (`.item()`, `.tolist()`, boolean masks, `nonzero`, `unique`), and
    those that copy host data to the device (a tensor built from a Python list, a copy from the CPU).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reason = _refused(func, args, kwargs or {})
        if reason:
            raise CaptureError(f"{func} {reason}; called at {_calling_line()}")
        return func(*args, **(kwargs or {}))


def _refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a graph cannot hold this call; empty if it can."""
    if func.overloadpacket in _host_readers():
        return "reads a value from the device while capturing"
    if func.overloadpacket in _mask_indexers() and any(_is_mask(index) for index in args[1] if index is not None):
        return "indexes with a boolean mask, whose size only the device knows"
    if func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return "has a size that only the device knows (give output_size)"
    if func is torch.ops.aten.lift_fresh.default and args[0].ndim > 0:
        return "copies host data to the device while capturing (a tensor built from Python values)"
    if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_) and _crosses_devices(args, kwargs):
        return "copies between host and device while capturing"
    return ""


@functools.cache
def _host_readers() -> frozenset[Any]:
    names = "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive equal is_nonzero bincount"
    return frozenset(getattr(torch.ops.aten, name) for name in names.split())


@functools.cache
def _mask_indexers() -> frozenset[Any]:
    return frozenset((torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_))


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _crosses_devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if isinstance(kwargs.get("device"), torch.device):
        return bool(kwargs["device"].type != args[0].device.type)
    return len(args) > 1 and isinstance(args[1], Tensor) and args[0].device.type != args[1].device.type


_TORCH = Path(torch.__file__).parent


def _calling_line() -> str:
    """The innermost line outside PyTorch and this file."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path != Path(__file__) and _TORCH not in path.parents and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"
