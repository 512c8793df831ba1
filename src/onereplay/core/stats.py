"""What an encoder did: replays, eager forwards by reason, padding, memory. Counts only; no clock runs per batch."""

import dataclasses
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from onereplay.core.plan import Eager, Plan, Reason, Replay

logger = logging.getLogger("onereplay")


@dataclass(frozen=True)
class CaptureReport:
    """What capturing gave and cost."""

    backend: str = ""
    budgets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Captured token budgets by path, ascending."""
    dropped: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Budgets whose capture failed, by path."""
    seconds: float = 0.0
    static_bytes: int = 0
    """Input and output buffers on the device."""
    pool_bytes: int = 0
    """What the graphs hold beside buffers and weights."""
    pinned_bytes: int = 0
    """Staging blocks in host memory."""

    def __str__(self) -> str:
        captured = "; ".join(
            f"{path}: {len(levels)} budgets to {max(levels, default=0):,}" for path, levels in self.budgets.items()
        )
        mib = (self.static_bytes + self.pool_bytes) / 2**20
        dropped = sum(map(len, self.dropped.values()))
        return (
            f"captured {captured} ({self.backend}), {self.seconds:.1f} s, {mib:,.0f} MiB"
            f"{f', {dropped} dropped' if dropped else ''}"
        )


@dataclass(frozen=True)
class Report:
    """A snapshot of what an encoder did since it was made. `str()` is for people, `to_dict()` for scripts."""

    capture: CaptureReport
    batches: int
    items: int
    replays: dict[str, dict[int, int]]
    """By path, by token budget."""
    eager: dict[str, dict[str, int]]
    """By path, by reason."""
    replayed_tokens: int
    """Real tokens that went through replays."""
    padding_tokens: int
    """Padding tokens that went through replays."""
    eager_tokens: int

    @property
    def padding_fraction(self) -> float:
        """Share of replayed rows that were padding, 0 to 1."""
        rows = self.replayed_tokens + self.padding_tokens
        return self.padding_tokens / rows if rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**dataclasses.asdict(self), "padding_fraction": self.padding_fraction}

    def __str__(self) -> str:
        lines = [str(self.capture), f"{self.batches:,} batches, {self.items:,} items"]
        for path, budgets in self.replays.items():
            if budgets:
                counts = ", ".join(f"{budget}: {count:,}" for budget, count in sorted(budgets.items()))
                lines.append(f"{path}: {sum(budgets.values()):,} replays ({counts})")
        for path, reasons in self.eager.items():
            lines += [f"{path}: {count:,} eager, {reason}" for reason, count in sorted(reasons.items())]
        lines.append(
            f"{self.replayed_tokens:,} tokens replayed with {self.padding_fraction:.1%} padding, "
            f"{self.eager_tokens:,} eager"
        )
        return "\n".join(lines)


class Stats:
    """Counters of one manager; used under its lock."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.capture = CaptureReport()
        self._batches = self._items = 0
        self._replayed = self._padding = self._eager_tokens = 0
        self._replays: dict[str, Counter[int]] = {path: Counter() for path in paths}
        self._eager: dict[str, Counter[Reason]] = {path: Counter() for path in paths}

    def count(self, plan: Plan, num_items: int) -> None:
        """Count one batch; log the first eager forward of each reason."""
        self._batches += 1
        self._items += num_items
        for path, step in plan.steps.items():
            tokens = plan.demands[path].tokens
            match step:
                case Replay(capacity):
                    self._replays[path][capacity.tokens] += 1
                    self._replayed += tokens
                    self._padding += capacity.tokens - tokens
                case Eager():
                    self.count_eager(path, step, tokens)

    def count_eager(self, path: str, step: Eager, tokens: int) -> None:
        """Count one eager forward of a path."""
        reason = step.reason
        if not self._eager[path][reason]:
            detail = f" ({step.detail})" if step.detail else ""
            logger.warning("path %r: an eager forward, %s%s; logged once a reason", path, reason.value, detail)
        self._eager[path][reason] += 1
        self._eager_tokens += tokens

    def report(self) -> Report:
        """A snapshot."""
        return Report(
            capture=self.capture,
            batches=self._batches,
            items=self._items,
            replays={path: dict(counts) for path, counts in self._replays.items()},
            eager={path: {r.value: n for r, n in counts.items()} for path, counts in self._eager.items()},
            replayed_tokens=self._replayed,
            padding_tokens=self._padding,
            eager_tokens=self._eager_tokens,
        )
