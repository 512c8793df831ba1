"""Running a benchmark, and its result as data."""

import copy
import gc
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onereplay.adapters import adapter_for
from onereplay.adapters.base import Adapter
from onereplay.bench.inputs import Shape, num_tokens, with_pixels_on, workload
from onereplay.bench.roofline import Roofline, encoder_flops, measure_roofline, weight_bytes
from onereplay.bench.timing import Card, Timing, card, measure
from onereplay.bench.ways import DEFAULT_WAYS, Prepared, Ways
from onereplay.checking import exact_products, plain_features
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.plan import Eager, Plan, Replay
from onereplay.encoder import load_model

logger = logging.getLogger(__name__)

TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 5120, 8192, 16384)
REFERENCE_TOKENS = 1024
"""Batches above this get no float32 reference."""
LARGE_BATCH = 2560
"""Tokens above which a mix's ratios are given apart."""
SLOWER = 0.02


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Attributes:
        model: a hub id, a directory, `preset:NAME`.
        workloads: of `onereplay.bench.inputs.WORKLOADS`.
        ways: of `onereplay.bench.ways.WAYS`.
        tokens: of the batches of `single`.
        batches: the first so many of each other workload.
        repeats: counted calls at most, of `single`; other workloads take five.
        seconds: time of the counted calls of one way and batch.
        config: of the encoder.
        commit: what the card names where git cannot.
    """

    model: str
    workloads: tuple[str, ...] = ("single",)
    ways: tuple[str, ...] = DEFAULT_WAYS
    tokens: tuple[int, ...] = TOKENS
    batches: int = 200
    repeats: int = 50
    seconds: float = 0.5
    device: str | None = None
    dtype: torch.dtype | None = None
    config: EncoderCudaGraphConfig = field(default_factory=EncoderCudaGraphConfig)
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One batch, encoded in every way."""

    batch: str
    items: int
    tokens: int
    step: str
    """What `replay` did: its budget, or eager with its reason."""
    padding_fraction: float | None
    """Share of the replayed tokens that was padding."""
    flops: int
    limit_ms: float
    timings: dict[str, Timing]
    from_host: Timing | None
    """`replay` of pixels that lie on the CPU in float32."""
    error_ours: float | None
    error_plain: float | None
    """Relative norms of the difference to the stock model in float32 with the same weights."""

    def ms(self, way: str) -> float | None:
        """Median time of a way, on the device where there is one."""
        return self.timings[way].best_ms.median if way in self.timings else None

    @property
    def limit_fraction(self) -> float | None:
        """The roofline's time over that of `replay`."""
        ours = self.ms("replay")
        return self.limit_ms / ours if ours else None


@dataclass(frozen=True, slots=True)
class Versus:
    """`replay` against another way over all batches of a workload; ratios are its time over ours."""

    way: str
    geomean: float
    geomean_large: float | None
    """Of batches over `LARGE_BATCH` tokens."""
    worst: float
    slower_share: float
    """Share of batches that are slower with ours by more than 2 %."""


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """One workload."""

    name: str
    rows: tuple[Row, ...]
    versus: tuple[Versus, ...]


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What the graphs of one way cost."""

    backend: str
    budgets: int
    largest: int
    dropped: int
    seconds: float
    static_mib: float
    pool_mib: float

    @property
    def mib(self) -> float:
        """Static buffers and pool."""
        return self.static_mib + self.pool_mib


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    command: str
    card: Card
    model: str
    engine: str
    device: str
    dtype: str
    attention: str
    rewrites: tuple[str, ...]
    random_weights: bool
    weight_mib: float
    plain_attention: str
    roofline: Roofline
    captures: dict[str, CaptureCost]
    workloads: tuple[WorkloadResult, ...]
    skipped: dict[str, str]
    """Ways that this model or machine does not have, with the reason."""


def run(options: Options, command: str = "", progress: Callable[[str], None] = logger.info) -> Result:
    """Measure one model in one process.

    Raises:
        OnereplayError: the model cannot be loaded or the options are refused.
    """
    model = load_model(options.model, options.device, options.dtype, options.config)
    adapter = adapter_for(model, options.config)
    ways = Ways(adapter, options.config)
    try:
        with torch.no_grad():
            return _run(options, command, ways, progress)
    finally:
        ways.close()
        gc.collect()


def _run(options: Options, command: str, ways: Ways, progress: Callable[[str], None]) -> Result:
    adapter = ways.adapter
    device, dtype = adapter.device, adapter.dtype
    roofline = measure_roofline(device, dtype)
    progress(str(roofline))
    skipped = {way: why for way in options.ways if (why := ways.why_not(way))}
    measured = [way for way in options.ways if way not in skipped]
    exact = _Exact(adapter.model, dtype)
    found = []
    for name in options.workloads:
        shapes = workload(name, adapter, options.tokens, None if name == "single" else options.batches)
        rows = []
        for shape in shapes:
            rows.append(_row(shape, name, options, ways, measured, roofline, exact, skipped))
            progress(_in_words(name, rows[-1]))
        found.append(WorkloadResult(name, tuple(rows), _versus(rows, measured)))
    captures = {way: _capture_cost(ways, way) for way in measured if way not in _UNCAPTURED}
    return Result(
        command=command,
        card=card(device, options.commit),
        model=options.model,
        engine=adapter.engine,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention=adapter.attention,
        rewrites=tuple(adapter.rewritten.names),
        random_weights=options.model.startswith("preset:"),
        weight_mib=weight_bytes(adapter) / 2**20,
        plain_attention=_attention_of(getattr(adapter.model, adapter.parts[0])),
        roofline=roofline,
        captures=captures,
        workloads=tuple(found),
        skipped=skipped,
    )


_UNCAPTURED = ("plain", "varlen", "compile", "reduce-overhead", "eager")


def _row(
    shape: Shape,
    name: str,
    options: Options,
    ways: Ways,
    measured: Sequence[str],
    roofline: Roofline,
    exact: "_Exact",
    skipped: dict[str, str],
) -> Row:
    adapter = ways.adapter
    batch = Prepared.of(adapter, shape)
    repeats = options.repeats if name == "single" else 5
    plan = ways.manager("replay").plan(adapter.batch(**batch.on_cpu))
    flops, tokens = encoder_flops(adapter, batch.resident), num_tokens(adapter, shape)

    def timed(call: Callable[[], object], inside: str) -> Timing:
        return measure(call, adapter.device, inside=inside, repeats=repeats, seconds=options.seconds)

    timings = {}
    for way in measured:
        if way in skipped:
            continue
        try:
            timings[way] = timed(ways.call(way, batch), way)
        except Exception as error:  # what PyTorch's own ways do with a model is their result, not ours to raise
            if way in ("eager", "replay"):
                raise
            skipped[way] = f"{type(error).__name__} at {shape.name}: {str(error).partition(chr(10))[0]:.120}"
    on_gpu = adapter.device.type == "cuda"
    reference = exact.rows(adapter, batch) if name == "single" and tokens <= REFERENCE_TOKENS else None
    return Row(
        batch=shape.name,
        items=len(shape.items),
        tokens=tokens,
        step=_step(plan),
        padding_fraction=_padding_fraction(plan),
        flops=flops,
        limit_ms=roofline.limit_ms(flops, weight_bytes(adapter)),
        timings=timings,
        from_host=timed(ways.from_host(batch), "replay, pixels on the CPU") if on_gpu and name == "single" else None,
        error_ours=_error(ways.call("replay", batch)(), reference),
        error_plain=_error(ways.call("plain", batch)(), reference),
    )


class _Exact:
    """The stock model in float32 with the same weights; not made before it is asked for."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._copy: torch.nn.Module | None = None

    def rows(self, adapter: Adapter[Any], batch: Prepared) -> Tensor:
        """What it gives for a batch: `(tokens, hidden)`."""
        if self._copy is None:
            self._copy = copy.deepcopy(self._model).float()
        inputs = with_pixels_on(batch.on_cpu, adapter.device, torch.float32)
        with exact_products():
            return plain_features(adapter, self._copy, inputs)


def _rows(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _error(parts: Sequence[Tensor], reference: Tensor | None) -> float | None:
    if reference is None:
        return None
    return float((_rows(parts).float() - reference).norm() / reference.norm())


def _versus(rows: Sequence[Row], measured: Sequence[str]) -> tuple[Versus, ...]:
    found = []
    for way in measured:
        ratios = [(row.tokens, row.ms(way), row.ms("replay")) for row in rows]
        known = [(tokens, other / ours) for tokens, other, ours in ratios if other and ours]
        if way != "replay" and known:
            values = [ratio for _, ratio in known]
            large = [ratio for tokens, ratio in known if tokens > LARGE_BATCH]
            slower = sum(ratio < 1 / (1 + SLOWER) for ratio in values) / len(values)
            found.append(Versus(way, _geomean(values), _geomean(large) if large else None, min(values), slower))
    return tuple(found)


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _capture_cost(ways: Ways, way: str) -> CaptureCost:
    report = ways.manager(way).report().capture
    budgets = [budget for levels in report.budgets.values() for budget in levels]
    return CaptureCost(
        backend=report.backend,
        budgets=len(budgets),
        largest=max(budgets, default=0),
        dropped=sum(map(len, report.dropped.values())),
        seconds=report.seconds,
        static_mib=report.static_bytes / 2**20,
        pool_mib=report.pool_bytes / 2**20,
    )


def _step(plan: Plan) -> str:
    several = len(plan.steps) > 1
    described = []
    for path, step in plan.steps.items():
        where = f"{path}: " if several else ""
        match step:
            case Replay(capacity):
                described.append(f"{where}{capacity.tokens:,}")
            case Eager(reason):
                described.append(f"{where}eager, {reason.value}")
    return "; ".join(described)


def _padding_fraction(plan: Plan) -> float | None:
    replays = [
        (step.capacity.tokens, plan.demands[path].tokens)
        for path, step in plan.steps.items()
        if isinstance(step, Replay)
    ]
    rows = sum(budget for budget, _ in replays)
    return 1 - sum(tokens for _, tokens in replays) / rows if rows else None


def _attention_of(part: object) -> str:
    return str(getattr(getattr(part, "config", None), "_attn_implementation", "its own"))


def _in_words(name: str, row: Row) -> str:
    times = ", ".join(f"{way} {timing.best_ms.median:.3g}" for way, timing in row.timings.items())
    return f"{name} {row.batch} ({row.tokens:,} tokens): {times} ms ({row.step})"
