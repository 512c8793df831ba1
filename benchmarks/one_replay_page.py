"""The result of `bench_one_replay` as data, and as a page of Markdown."""

from dataclasses import dataclass

from benchmarks.report import card_lines, error, number, percent, spread, table
from benchmarks.roofline import Roofline
from benchmarks.timing import Card, Timing

REFERENCE_TOKENS = 1024
"""Batches above this get no float32 reference."""

PLAIN_INSIDE = "get_image_features"
OURS_INSIDE = "adapter.batch and manager.encode: plan, pack, copies, forward or replay, split"
RESIDENT = "pixels on the device in the model's dtype"
PLAIN_FROM_HOST = "copy of float32 pixels and of grids from pageable memory to the device and conversion there"
OURS_FROM_HOST = "conversion of float32 pixels into pinned memory and copy to the device"


@dataclass(frozen=True, slots=True)
class Cost:
    """One way to encode one batch."""

    resident: Timing
    """Pixels on the encoder's device."""
    from_host: Timing | None
    """Pixels on the CPU; `None` where that is the encoder's device."""

    @property
    def host_ms(self) -> float | None:
        """Host time of a batch whose pixels come from the CPU."""
        return self.from_host.host_ms.median if self.from_host and self.from_host.host_ms else None


@dataclass(frozen=True, slots=True)
class Row:
    """One batch, encoded in three ways."""

    batch: str
    items: int
    tokens: int
    step: str
    """What ours did: a replay with its budget, or eager with its reason."""
    padding_fraction: float | None
    """Share of the replayed rows that was padding."""
    flops: int
    limit_ms: float
    plain: Cost
    eager: Cost
    ours: Cost
    error_ours: float | None
    error_plain: float | None

    @property
    def limit_fraction(self) -> float:
        """The roofline's time over ours."""
        return self.limit_ms / self.ours.resident.best_ms.median

    @property
    def items_per_second(self) -> float:
        """Of ours, by wall time, pixels on the device."""
        return self.items / self.ours.resident.wall_ms.median * 1e3


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What the graphs cost, and what the largest alone would."""

    backend: str
    budgets: int
    largest: int
    dropped: int
    seconds: float
    static_mib: float
    pool_mib: float
    largest_alone_mib: float

    @property
    def mib(self) -> float:
        """Static buffers and pool, all budgets."""
        return self.static_mib + self.pool_mib


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One preset."""

    preset: str
    checkpoint: str
    assumed: tuple[str, ...]
    weight_mib: float
    plain_attention: str
    capture: CaptureCost
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    command: str
    card: Card
    device: str
    dtype: str
    roofline: Roofline
    models: tuple[ModelResult, ...]


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def page(result: Result) -> str:
    """The run as Markdown."""
    clock = "device time (between CUDA events)" if result.card.gpu else "wall time"
    lines = [
        "# One replay against plain transformers and eager",
        "",
        *card_lines(result.card),
        f"- {result.device}, {result.dtype}, random weights; roofline: {result.roofline}",
        f"- `{result.command}`",
        "",
        f"Milliseconds are median (p99) of {clock}. In the clock:",
        "",
        f"- plain: {PLAIN_INSIDE}; grids on the device too",
        f"- eager and ours: {OURS_INSIDE}; grids on the CPU",
        "",
        f"{RESIDENT.capitalize()} before the clock starts. Where no budget holds the batch, ours is the eager forward,",
        "and `step` says so. Limit is the larger of operations over the product rate and weights over the copy rate,",
        "for the real tokens. Errors are relative norms of the difference to plain transformers in float32 with the",
        f"same weights, for batches of up to {REFERENCE_TOKENS:,} tokens.",
    ]
    for model in result.models:
        lines += ["", f"## {model.preset}", "", *_facts(model), "", *_speed_table(model)]
        if result.card.gpu:
            lines += ["", *_HOST_NOTE, "", *_host_table(model)]
    return "\n".join(lines) + "\n"


def _facts(model: ModelResult) -> list[str]:
    cost = model.capture
    assumed = f"; not read in a published file: {', '.join(model.assumed)}" if model.assumed else ""
    dropped = f", {cost.dropped} dropped" if cost.dropped else ""
    return [
        f"- sizes of {model.checkpoint}, {model.weight_mib:,.0f} MiB of weights{assumed}",
        f"- plain attention: {model.plain_attention}",
        f"- capture ({cost.backend}): {cost.budgets} budgets to {cost.largest:,}, {cost.seconds:.1f} s{dropped}",
        f"- graph memory: {cost.mib:,.0f} MiB ({cost.static_mib:,.0f} static, {cost.pool_mib:,.0f} pool), "
        f"{cost.mib / cost.largest_alone_mib:.2f} times that of the largest budget alone "
        f"({cost.largest_alone_mib:,.0f} MiB)",
    ]


_SPEED_HEADER = (
    *("batch", "items", "tokens", "step", "padding", "plain ms", "eager ms", "ours ms", "plain/ours", "eager/ours"),
    *("limit ms", "of limit", "error ours", "error plain"),
)


def _speed_table(model: ModelResult) -> list[str]:
    return table(_SPEED_HEADER, [_speed_cells(row) for row in model.rows])


def _speed_cells(row: Row) -> list[str]:
    plain, eager, ours = (cost.resident.best_ms for cost in (row.plain, row.eager, row.ours))
    return [
        *(row.batch, str(row.items), f"{row.tokens:,}", row.step, percent(row.padding_fraction)),
        *(spread(plain), spread(eager), spread(ours)),
        *(f"{plain.median / ours.median:.2f}", f"{eager.median / ours.median:.2f}"),
        *(number(row.limit_ms), percent(row.limit_fraction), error(row.error_ours), error(row.error_plain)),
    ]


_HOST_HEADER = (
    *("batch", "plain wall ms", "eager wall ms", "ours wall ms", "items/s"),
    *("plain host ms", "eager host ms", "ours host ms", "plain peak MiB", "eager peak MiB", "ours peak MiB", "calls"),
)


_HOST_NOTE = (
    "Wall: until the device is idle, pixels on the device. Host: until the call returns, pixels on the CPU. In the",
    f"host's clock: {PLAIN_FROM_HOST} (plain); {OURS_FROM_HOST} (eager and ours). Peak is memory that the calls",
    "allocate beside weights, inputs and graphs. Calls are the counted ones of plain, eager and ours.",
)


def _host_table(model: ModelResult) -> list[str]:
    return table(_HOST_HEADER, [_host_cells(row) for row in model.rows])


def _host_cells(row: Row) -> list[str]:
    costs = row.plain, row.eager, row.ours
    return [
        row.batch,
        *(spread(cost.resident.wall_ms) for cost in costs),
        f"{row.items_per_second:,.0f}",
        *(number(cost.host_ms) for cost in costs),
        *(number(cost.resident.peak_mib) for cost in costs),
        "/".join(str(cost.resident.repeats) for cost in costs),
    ]
