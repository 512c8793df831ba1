"""A profile without a GPU: kernels and bytes of the tower, and a GPU of four numbers.

The tower is built on PyTorch's meta device and its forward runs there once for each count: nothing is computed, every
operation is seen with its shapes. An operation that launches a kernel takes

    max(operations / product rate, bytes read and written / memory rate) + a kernel's fixed cost

and a replay takes the sum of these, an eager forward the larger of that sum and `launches x launch cost`. Under
`compiled_blocks` or `fused_blocks` all operations between two products or attentions count as one kernel, which reads
what comes from outside of it and writes what is used behind it. Attention counts the rows of each sequence and no
matrix of probabilities; sequences are taken as equally long, as they are in the batches of a profile.

What is left out: rates that depend on a product's size and shape, the host's metadata, and that attention is slower
than products. With 550 TFLOP/s, 4.1 TB/s and 5 us a kernel, replays of Qwen2.5-VL-7B, InternVL3-8B and LFM2-VL-1.6B, of
64 to 5,120 tokens, come out at 0.74 to 1.20 times what an H200 took (`benchmarks/results/one_replay_*`). `compared`
says how far another profile is.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from onereplay import loading, presets
from onereplay.adapters import adapter_class
from onereplay.adapters.base import Adapter
from onereplay.attention.ops import OPERATOR
from onereplay.bench.inputs import Shape, processor_outputs
from onereplay.bench.profile import Capture, PathTimes, Point, Profile, batch_of, described
from onereplay.config import REWRITES, EncoderCudaGraphConfig
from onereplay.core.budgets import round_up
from onereplay.core.buffers import Layout, Output, Staged
from onereplay.core.plan import demand_of
from onereplay.core.staging import exact_buffers
from onereplay.errors import ConfigError, OnereplayError, UnsupportedModelError

COUNTS = (64, 128, 256, 512, 1024, 2048, 4096, 16_384)
"""Tokens that are computed; between them the times are straight lines."""
META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and its host in four numbers."""

    tflops: float
    """Rate that an encoder's products and attention reach, in 1e12 operations a second. On an H200 550 fits four
    towers: 0.7 of what a product of 8192^3 reaches, 0.56 of the data sheet's dense peak."""
    tb_s: float
    """Rate of large copies, read and written, in 1e12 bytes a second: 4.1 on an H200, 0.85 of the data sheet's."""
    launch_us: float
    """Microseconds of the host for each kernel of an eager forward: Python, dispatch and launch. The slower the host,
    the more a graph gains; 30 to 45 were measured for compiled blocks."""
    kernel_us: float
    """Microseconds that each kernel takes beside its work: its start, its last wave, the gap behind it. On an H200 5
    fits."""

    @classmethod
    def parse(cls, text: str) -> "Gpu":
        """From `tflops=550,tb_s=4.1,launch_us=40,kernel_us=5`.

        Raises:
            ConfigError: a number is missing, unknown or not positive.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        given: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            try:
                given[name.strip()] = float(value)
            except ValueError:
                raise ConfigError(f"gpu: {part!r} is no number; give name=number, such as tflops=550") from None
        wrong = [name for name in given if name not in names] or [name for name in names if name not in given]
        if wrong:
            raise ConfigError(f"gpu={text!r}: {', '.join(wrong)} is unknown or missing; give {', '.join(names)}")
        for name, number in given.items():
            if not 0 < number < float("inf"):
                raise ConfigError(f"gpu: {name}={number} is not positive; give a positive number")
        return cls(**given)

    def __str__(self) -> str:
        return (
            f"{self.tflops:g} TFLOP/s, {self.tb_s:g} TB/s, {self.launch_us:g} us a launch, "
            f"{self.kernel_us:g} us a kernel"
        )


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch."""

    name: str
    flops: int
    num_bytes: int
    """Read and written."""

    def milliseconds(self, gpu: Gpu) -> float:
        """What it takes; see the module."""
        return max(self.flops / gpu.tflops, self.num_bytes / gpu.tb_s) / 1e9 + gpu.kernel_us / 1e3


def analytic_profile(
    model: str,
    gpu: Gpu,
    config: EncoderCudaGraphConfig | None = None,
    *,
    counts: Sequence[int] = COUNTS,
    dtype: torch.dtype = torch.bfloat16,
) -> Profile:
    """The profile of a preset that a GPU would have, as the module says. Needs no GPU and no weights.

    Args:
        model: `preset:NAME`.
        gpu: the four numbers.
        config: of the encoder; without `optimize`, every rewrite counts as on.
        counts: tokens; rounded up to whole tiles.
        dtype: of weights and pixels.

    Raises:
        ConfigError: the model is no preset.
        UnsupportedModelError: the tower does not run on the meta device.
    """
    config = config or EncoderCudaGraphConfig()
    adapter = meta_adapter(model, config, dtype)
    rewrites = REWRITES if config.optimize is None else config.optimize
    fused = not {"compiled_blocks", "fused_blocks"}.isdisjoint(rewrites)
    paths, pools, launches = {}, 0.0, 0
    for path in adapter.paths():
        unit = adapter.unit(path)
        traces = {count: trace(adapter, path, count) for count in sorted({round_up(count, unit) for count in counts})}
        paths[path] = PathTimes(unit, tuple(_point(count, one, gpu, fused=fused) for count, one in traces.items()))
        largest = traces[paths[path].largest]
        pools += largest.peak_bytes(fused=fused)
        launches += len(largest.kernels(fused=fused))
    static = sum(_static_bytes(adapter, path, times.largest, config) for path, times in paths.items())
    capture = Capture("analytic", 0, 0, 0.0, static / 2**20, pools / 2**20)
    found = described(model, adapter, config, paths, capture)
    return dataclasses.replace(found, device=str(gpu), rewrites=tuple(rewrites), launches=launches)


def _point(tokens: int, trace: "Trace", gpu: Gpu, *, fused: bool) -> Point:
    kernels = trace.kernels(fused=fused)
    busy = sum(kernel.milliseconds(gpu) for kernel in kernels)
    launched = len(kernels) * gpu.launch_us / 1e3
    host = gpu.launch_us / 1e3
    return Point(tokens, trace.items, busy + host, host, max(busy, launched), launched)


def meta_adapter(model: str, config: EncoderCudaGraphConfig, dtype: torch.dtype = torch.bfloat16) -> Adapter[Any]:
    """A preset's adapter on modules without values.

    Raises:
        ConfigError: the model is no preset.
    """
    if not model.startswith(presets.PREFIX):
        raise ConfigError(f"model={model!r} is no preset; the analytic model takes preset:NAME, see `onereplay models`")
    preset = presets.get_preset(model.removeprefix(presets.PREFIX))
    found = adapter_class(preset.model_type)
    modules = loading.vision_model(presets.hf_config(preset), device=META, dtype=dtype, parts=found.parts)
    adapter = found(modules.config, modules)
    adapter.configure(config)
    return adapter


def _static_bytes(adapter: Adapter[Any], path: str, tokens: int, config: EncoderCudaGraphConfig) -> int:
    """Input and output buffers of a graph of this budget."""
    spec = adapter.paths()[path]
    cap = EncoderCudaGraphConfig.max_token_budget
    capacity = adapter.capacities(path, dataclasses.replace(config, token_budgets=(tokens,), max_token_budget=cap))[-1]
    rows = sum(
        getattr(capacity, part.unit) * math.prod(part.shape)
        for part in (*spec.buffers, *spec.outputs)
        if isinstance(part, Staged | Output)
    )
    return int(Layout(spec.buffers, capacity, padded=True).num_bytes + rows * adapter.dtype.itemsize)


# ---------------------------------------------------------------------------------------------------------------------
# Seeing a forward
# ---------------------------------------------------------------------------------------------------------------------

Memory = tuple[int, int]
"""Which storage, and bytes of it that are read or written."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that launches a kernel."""

    name: str
    flops: int
    reads: tuple[Memory, ...]
    writes: tuple[Memory, ...]

    @property
    def is_heavy(self) -> bool:
        """A product, a convolution or an attention: nothing is fused into it."""
        return self.flops > 0


@dataclass(frozen=True)
class Trace:
    """The operations of one forward, in order."""

    items: int
    operations: tuple[Operation, ...]
    results: frozenset[int]
    """Storages that the caller gets."""

    @property
    def flops(self) -> int:
        """Operations of products, convolutions and attention."""
        return sum(operation.flops for operation in self.operations)

    def kernels(self, *, fused: bool) -> list[Kernel]:
        """What is launched; `fused` makes one kernel of what lies between products and attentions."""
        found = []
        for part in self._parts(fused):
            reads, writes = self._memory(part)
            name = self.operations[part.start].name if len(part) == 1 else f"{len(part)} fused"
            flops = sum(self.operations[place].flops for place in part)
            found.append(Kernel(name, flops, sum(reads.values()) + sum(writes.values())))
        return found

    def peak_bytes(self, *, fused: bool) -> int:
        """The most bytes of intermediate results that are alive at once, each until its last use."""
        alive: dict[int, int] = {}
        peak = 0
        for part in self._parts(fused):
            alive |= self._memory(part)[1]
            peak = max(peak, sum(alive.values()))
            alive = {storage: size for storage, size in alive.items() if self._is_needed(storage, part)}
        return peak

    def _parts(self, fused: bool) -> list[range]:
        """Consecutive operations that are one kernel, as places."""
        starts = [
            place
            for place, operation in enumerate(self.operations)
            if not fused or place == 0 or operation.is_heavy or self.operations[place - 1].is_heavy
        ]
        return [range(*ends) for ends in pairwise([*starts, len(self.operations)])]

    def _memory(self, part: range) -> tuple[dict[int, int], dict[int, int]]:
        """Bytes by storage that a kernel reads from outside of it, and that it writes for others."""
        reads: dict[int, int] = {}
        made: dict[int, int] = {}
        for place in part:
            for storage, size in self.operations[place].reads:
                if storage not in made:
                    reads[storage] = max(reads.get(storage, 0), size)
            for storage, size in self.operations[place].writes:
                made[storage] = max(made.get(storage, 0), size)
        return reads, {storage: size for storage, size in made.items() if self._is_needed(storage, part)}

    def _is_needed(self, storage: int, part: range) -> bool:
        """Whether something behind these operations reads the storage, or the caller gets it."""
        return storage in self.results or self._last_use.get(storage, -1) >= part.stop

    @cached_property
    def _last_use(self) -> dict[int, int]:
        return {storage: place for place, operation in enumerate(self.operations) for storage, _ in operation.reads}


def trace(adapter: Adapter[Any], path: str, tokens: int) -> Trace:
    """The operations of an eager forward of `batch_of(adapter, path, tokens)`.

    Args:
        adapter: as `meta_adapter` makes it.
        path: one of its paths.
        tokens: a multiple of the path's unit.

    Raises:
        UnsupportedModelError: the tower does not run on the meta device.
    """
    shape = batch_of(adapter, path, tokens)
    try:
        with torch.no_grad():
            return _traced(adapter, path, shape)
    except OnereplayError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{adapter.model_type} does not run on PyTorch's meta device ({str(error).partition(chr(10))[0]:.100}); "
            f"measure it on a GPU with `onereplay bench MODEL --profile`"
        ) from error


def _traced(adapter: Adapter[Any], path: str, shape: Shape) -> Trace:
    with _OnesForRandom():
        inputs = processor_outputs(adapter, shape, adapter.dtype)
    batch = adapter.batch(**inputs)
    packed, spec = adapter.pack(path, batch), adapter.paths()[path]
    layout = Layout(packed.as_they_come(spec.buffers), demand_of(batch.items, path), padded=False)
    buffers = exact_buffers(packed, layout, adapter.dtype, adapter.device)
    with _Operations() as seen, _FusedAttention(seen):
        results = adapter.forward(path, buffers, layout.bounds())
    return Trace(len(shape.items), tuple(seen.operations), frozenset(map(_storage, results)))


class _OnesForRandom(TorchFunctionMode):
    """Pixels of any value do, and random ones take time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.randn, torch.rand):
            return func(*args, **(kwargs or {}))
        return torch.ones(*args, **{name: value for name, value in (kwargs or {}).items() if name == "dtype"})


class _Operations(TorchDispatchMode):
    """Notes every operation that launches a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._kept: list[Any] = []
        """What was seen stays alive, so that no storage takes another's place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket in _WITHOUT_KERNEL):
            self.note(func.overloadpacket, args, kwargs or {}, result)
        return result

    def note(self, packet: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """One more operation."""
        reads = [each for each in tree_leaves((args, dict(kwargs))) if isinstance(each, Tensor)]
        writes = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.numel()]
        if not writes:
            return
        self._kept.append((reads, writes))
        flops = _flops(packet, args, kwargs, result)
        self.operations.append(Operation(str(packet), flops, _memories(reads), _memories(writes)))


class _FusedAttention(TorchFunctionMode):
    """PyTorch's attention as one operation: the meta device would show that of a machine without kernels for it."""

    def __init__(self, seen: _Operations) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        query, key, value = given["query"], given["key"], given["value"]
        with torch.utils._python_dispatch._disable_current_modes():
            result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        self._seen.note(func, (query, key, value, given.get("attn_mask")), {}, result)
        return result


_aten = torch.ops.aten
_WITHOUT_KERNEL = {
    *(_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided),
    *(_aten.detach, _aten._unsafe_view, _aten.lift_fresh, _aten._reshape_alias),
}


def _flops(packet: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    if packet is OPERATOR:
        query, _, value, offsets = args[:4]
        return _attention(len(query) ** 2 / max(len(offsets) - 1, 1), query, value)
    if packet is functional.scaled_dot_product_attention:
        query, key, value, _ = args
        pairs = math.prod(query.shape[:-1]) * key.shape[-2]
        return int(2 * pairs * (query.shape[-1] + value.shape[-1]))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention(pairs: float, query: Tensor, value: Tensor) -> int:
    """Logits and weighted sum over all heads; rows are `(P, heads, size)`."""
    return round(2 * pairs * query.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _memories(tensors: Iterable[Tensor]) -> tuple[Memory, ...]:
    """Storages with the bytes that these views of them cover."""
    found: dict[int, int] = {}
    for each in tensors:
        storage = _storage(each)
        whole = each.untyped_storage().nbytes()
        found[storage] = min(found.get(storage, 0) + each.numel() * each.element_size(), whole)
    return tuple(found.items())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# ---------------------------------------------------------------------------------------------------------------------
# Against measurements
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """Predicted and measured milliseconds of one count on one path."""

    path: str
    tokens: int
    replay_ms: float | None
    predicted_replay_ms: float
    eager_ms: float
    predicted_eager_ms: float

    @property
    def replay_ratio(self) -> float | None:
        """Predicted over measured."""
        return self.predicted_replay_ms / self.replay_ms if self.replay_ms else None

    @property
    def eager_ratio(self) -> float | None:
        """Predicted over measured."""
        return self.predicted_eager_ms / self.eager_ms if self.eager_ms else None


def compared(measured: Profile, predicted: Profile) -> list[Compared]:
    """Every measured count beside what the other profile says there."""
    return [
        Compared(
            path,
            point.tokens,
            point.replay_ms,
            predicted.paths[path].replay_ms(point.tokens),
            point.eager_ms,
            predicted.paths[path].eager_ms(point.tokens),
        )
        for path, times in measured.paths.items()
        for point in times.points
    ]
