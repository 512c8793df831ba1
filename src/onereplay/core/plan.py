"""The rule: a batch is one replay of the smallest capacity that holds the whole of it, or one eager forward.

`plan` is a pure function of integers. It reads no clock, no device and no random number, and it only adds and compares,
so every rank and every start gives the same answer, and any order of the same items gives it too.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TypeVar

from onereplay.core.items import Item

T = TypeVar("T")


class Reason(enum.Enum):
    """Why a path of a batch runs eagerly."""

    NOT_CAPTURED = "no captured graph"
    UNSUPPORTED_INPUT = "unsupported input"
    OVER_LARGEST_BUDGET = "over the largest budget"
    TOO_MANY_ITEMS = "too many items"
    TOO_MANY_SEQUENCES = "too many sequences"
    SEQUENCE_TOO_LONG = "a sequence too long"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one captured graph holds, in every dimension. Also what a batch demands of a path: the same fields."""

    tokens: int
    patches: int
    sequences: int
    items: int
    windows: int = 0
    longest: int = 0

    def holds(self, demand: "Capacity") -> bool:
        """True if no dimension of `demand` exceeds this capacity."""
        return (
            demand.tokens <= self.tokens
            and demand.patches <= self.patches
            and demand.sequences <= self.sequences
            and demand.items <= self.items
            and demand.windows <= self.windows
            and demand.longest <= self.longest
        )

    def _exceeded(self, demand: "Capacity") -> Iterator[Reason]:
        if demand.items > self.items:
            yield Reason.TOO_MANY_ITEMS
        if demand.tokens > self.tokens or demand.patches > self.patches:
            yield Reason.OVER_LARGEST_BUDGET
        if demand.sequences > self.sequences or demand.windows > self.windows:
            yield Reason.TOO_MANY_SEQUENCES
        if demand.longest > self.longest:
            yield Reason.SEQUENCE_TOO_LONG


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay of one captured graph."""

    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Eager:
    """One eager forward of the whole batch."""

    reason: Reason
    detail: str = ""
    """What exceeded what, for a person."""


Step = Replay | Eager


@dataclass(frozen=True, slots=True)
class Plan:
    """What one batch will do: one step and one demand for every path that it uses. Prints itself."""

    steps: Mapping[str, Step]
    demands: Mapping[str, Capacity]

    @property
    def all_replayed(self) -> bool:
        """True if no path runs eagerly."""
        return all(isinstance(step, Replay) for step in self.steps.values())

    def __str__(self) -> str:
        return "; ".join(self._describe(path) for path in self.steps) or "nothing to run"

    def _describe(self, path: str) -> str:
        step, demand = self.steps[path], self.demands[path]
        match step:
            case Replay(capacity):
                spare = capacity.tokens - demand.tokens
                return f"{path}: replay {capacity.tokens} ({demand.tokens} tokens, {spare} padding)"
            case Eager(reason, detail):
                return f"{path}: eager, {reason.value}{f' ({detail})' if detail else ''}"


def plan(items: Sequence[Item], capacities: Mapping[str, Sequence[Capacity]]) -> Plan:
    """One step for every path that the batch uses: the smallest capacity that holds all of it, or eager.

    Args:
        items: the whole batch, in the caller's order.
        capacities: for every path, the captured capacities in any order.

    Returns:
        A step and a demand for each path that some item uses, in the order of `capacities`.
    """
    demands = {path: demand_of(items, path) for path in capacities if any(path in item.sizes for item in items)}
    steps = {path: _step(items, path, demand, capacities[path]) for path, demand in demands.items()}
    return Plan(steps, demands)


def batches(
    entries: Iterable[T],
    item_of: Callable[[T], Item | None],
    capacities: Callable[[], Mapping[str, Sequence[Capacity]]],
) -> Iterator[list[T]]:
    """Consecutive entries in batches that can be replayed; lazily, so that `entries` may be endless.

    A batch takes the next entries as long as all of it can be replayed; an entry that no capacity holds is alone. An
    entry without an item (one that could not be read) rides along and keeps its place.
    """
    pending: list[T] = []
    items: list[Item] = []
    for entry in entries:
        item = item_of(entry)
        if item is not None:
            if items and not plan([*items, item], capacities()).all_replayed:
                yield pending
                pending, items = [], []
            items.append(item)
        pending.append(entry)
    if pending:
        yield pending


def demand_of(items: Sequence[Item], path: str) -> Capacity:
    """What the batch asks of one path: sums over its items, the maximum for `longest`."""
    sizes = [item.sizes[path] for item in items if path in item.sizes]
    return Capacity(
        tokens=sum([size.tokens for size in sizes]),
        patches=sum([size.patches for size in sizes]),
        sequences=sum([size.sequences for size in sizes]),
        items=len(sizes),
        windows=sum([size.windows for size in sizes]),
        longest=max([size.longest for size in sizes], default=0),
    )


def _step(items: Sequence[Item], path: str, demand: Capacity, ladder: Sequence[Capacity]) -> Step:
    unsupported = min((item.unsupported for item in items if path in item.sizes and item.unsupported), default="")
    if unsupported:
        return Eager(Reason.UNSUPPORTED_INPUT, unsupported)
    if not ladder:
        return Eager(Reason.NOT_CAPTURED)
    ascending = sorted(ladder, key=_tokens)
    fitting = next((capacity for capacity in ascending if capacity.holds(demand)), None)
    return _overflow(demand, ascending[-1]) if fitting is None else Replay(fitting)


_tokens = attrgetter("tokens")


def _overflow(demand: Capacity, largest: Capacity) -> Eager:
    """Eager with the first dimension in which even the largest capacity is too small."""
    reason = next(largest._exceeded(demand))
    exceeded = [field.name for field in fields(Capacity) if getattr(demand, field.name) > getattr(largest, field.name)]
    return Eager(
        reason, ", ".join(f"{getattr(demand, name):,} {name} > {getattr(largest, name):,}" for name in exceeded)
    )
