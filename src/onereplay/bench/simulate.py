"""What a cap and a grid of budgets are worth, computed from times: `onereplay simulate`.

Pure functions of profiles (`onereplay.bench.profile`, measured or analytic) and of batches as integers. For each batch
of a workload, this project's rule and an earlier rule (`onereplay.bench.dispatch`) say what runs; a profile says how
long that takes:

* a replay takes the time of its budget, whatever is real in it;
* an eager forward takes the time of its tokens;
* several replays of a batch follow one another on the device, while the host prepares the next: each waits for the one
  before and for the host.

A replay is timed with full buffers, so padding costs here what tokens cost; on a device padding is a little cheaper,
since its sequences are short.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from onereplay.adapters.base import Adapter
from onereplay.adapters.multipath import GLOBAL, LOCAL
from onereplay.bench.analytic import Compared
from onereplay.bench.dispatch import Rule
from onereplay.bench.grids import GRIDS, BudgetGrid
from onereplay.bench.inputs import Shape, num_tokens, workload
from onereplay.bench.profile import Profile
from onereplay.bench.run import LARGE_BATCH, SLOWER, Versus
from onereplay.bench.ways import RULES
from onereplay.core.budgets import normalize_budgets
from onereplay.encoder import planner
from onereplay.errors import ConfigError

CAPS = (1024, 1536, 2048, 2560, 3072, 3584, 4096, 4608, 5120, 6144, 8192, 12_288, 16_384)
WORKLOADS = ("mix-v1", "mix-log", "cases", "videos")
AGAINST = "half-octave"
"""The earlier rule that a recommendation is made against."""
OWN = "own"
"""The grid of a user's list."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Item = Mapping[str, int]
"""Tokens of one item on each path that it uses."""
Batch = Sequence[Item]


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


def batches_of(profile: Profile, name: str, limit: int | None = None) -> list[Batch]:
    """The batches of a workload for a profile's model, from its configuration alone.

    Raises:
        ConfigError: the model does not take this workload.
    """
    adapter = planner(profile.model, profile.config)[0].adapter
    shapes = workload(name, adapter, (), limit)
    if not shapes:
        raise ConfigError(f"workload={name!r} has no batch for {profile.model}; use another of {', '.join(WORKLOADS)}")
    return [[_item(adapter, item) for item in shape.items] for shape in shapes]


def _item(adapter: Adapter[Any], grids: tuple[Any, ...]) -> Item:
    if adapter.engine != "multi-path":
        return {next(iter(adapter.paths())): num_tokens(adapter, Shape("", (grids,)))}
    tiles = sum(grid.num_patches for grid in grids)
    sizes = {GLOBAL: adapter.unit(GLOBAL) * len(grids), LOCAL: adapter.unit(LOCAL) * tiles}
    return {path: tokens for path, tokens in sizes.items() if tokens}


# ---------------------------------------------------------------------------------------------------------------------
# Times
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """What the batches of a workload ask of one model, and what earlier rules take for them."""

    profile: Profile
    batches: Sequence[Batch]

    @cached_property
    def num_items(self) -> Integers:
        """Of each batch."""
        return np.array([len(batch) for batch in self.batches])

    @cached_property
    def by_path(self) -> Mapping[str, Integers]:
        """Tokens of each batch on each path."""
        return {
            path: np.array([sum(item.get(path, 0) for item in batch) for batch in self.batches])
            for path in self.profile.paths
        }

    @cached_property
    def tokens(self) -> Integers:
        """Of each batch."""
        return np.array([sum(sum(item.values()) for item in batch) for batch in self.batches])

    @cached_property
    def earlier_ms(self) -> Mapping[str, Floats]:
        """Milliseconds of each batch by each earlier rule."""
        return {way: self._earlier(rule, levels()) for way, (rule, levels) in RULES.items()}

    def _earlier(self, rule: Rule, levels: tuple[int, ...]) -> Floats:
        budgets = {
            path: normalize_budgets(levels, item_tokens=times.unit) for path, times in self.profile.paths.items()
        }
        bound = self.profile.config.items_bound
        return np.array([self._split_ms(batch, rule, bound, budgets) for batch in self.batches])

    def _split_ms(self, batch: Batch, rule: Rule, bound: int, budgets: Mapping[str, tuple[int, ...]]) -> float:
        parts = rule([sum(item.values()) for item in batch], bound)
        return pipeline_ms(self._part_ms([batch[place] for place in part.items], budgets) for part in parts)

    def _part_ms(self, items: Sequence[Item], budgets: Mapping[str, tuple[int, ...]]) -> tuple[float, float]:
        """Milliseconds of one sub-batch, and those of the host in them."""
        device = host = 0.0
        for path, times in self.profile.paths.items():
            tokens = sum(item.get(path, 0) for item in items)
            if tokens:
                fitting = next((budget for budget in budgets[path] if budget >= tokens), None)
                device += times.eager_ms(tokens) if fitting is None else times.replay_ms(fitting)
                host += 0.0 if fitting is None else times.replay_host_ms(fitting)
        return device, host

    def ours_ms(self, budgets: Mapping[str, Sequence[int]]) -> "Ours":
        """What this project's rule takes with these budgets of each path: one replay, or one eager forward."""
        total = np.zeros(len(self.batches))
        padding = rows = 0
        eager = np.zeros(len(self.batches), dtype=bool)
        for path, times in self.profile.paths.items():
            tokens, levels = self.by_path[path], np.array(budgets[path])
            place = np.searchsorted(levels, tokens)
            replayed = (place < len(levels)) & (self.num_items <= self.profile.config.items_bound) & (tokens > 0)
            budget = np.where(replayed, levels[np.minimum(place, len(levels) - 1)], 0)
            alone = (tokens > 0) & ~replayed
            total += np.where(replayed, _each(times.replay_ms, budget), 0.0)
            total += np.where(alone, _each(times.eager_ms, tokens), 0.0)
            padding += int((budget - tokens)[replayed].sum())
            rows += int(budget.sum())
            eager |= alone
        return Ours(total, padding / rows if rows else 0.0, float(eager.mean()))


@dataclass(frozen=True)
class Ours:
    """This project's rule over the batches of a workload."""

    milliseconds: Floats
    padding_fraction: float
    """Share of the replayed rows that is padding."""
    eager_share: float
    """Share of batches of which something runs eagerly."""


def _each(time: Callable[[int], float], counts: Integers) -> Floats:
    """A time of each count, looked up once a count; 0 tokens take none."""
    distinct, places = np.unique(counts, return_inverse=True)
    return np.array([time(int(count)) if count else 0.0 for count in distinct])[places]


def pipeline_ms(parts: Any) -> float:
    """When the last of several sub-batches is through: each needs the host before the device, and the device in order.

    Args:
        parts: of each sub-batch its milliseconds alone, and those of the host in them.
    """
    host = device = 0.0
    for alone, preparing in parts:
        host += min(preparing, alone)
        device = max(device, host) + max(alone - preparing, 0.0)
    return device


# ---------------------------------------------------------------------------------------------------------------------
# A study
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """One model (or all) with one grid and one cap."""

    model: str
    grid: str
    cap: int
    levels: int
    """Graphs that are captured, over all paths; of all models, the most."""
    padding_fraction: float
    eager_share: float
    graph_mib: float
    """Estimated; over all models, their sum."""
    versus: tuple[Versus, ...]
    """Against each earlier rule; ratios are its time over ours."""
    worst_tokens: int
    """Of the batch that is slowest against `AGAINST`."""

    def against(self, way: str = AGAINST) -> Versus:
        """The comparison with one earlier rule."""
        return next(one for one in self.versus if one.way == way)


@dataclass(frozen=True, slots=True)
class Study:
    """A simulation."""

    command: str
    workload: str
    batches: int
    """Over all models; each leaves out what is too large for it."""
    models: tuple[str, ...]
    """Each with its device."""
    outcomes: tuple[Outcome, ...]
    """By model, grid and cap."""
    overall: tuple[Outcome, ...]
    """Over all models, each counting alike."""
    recommended: dict[str, int | None]
    """By grid: the smallest cap with no batch over 2 % slower than by `AGAINST`; None if there is none."""
    notes: tuple[str, ...]
    compared: tuple[tuple[str, tuple[Compared, ...]], ...] = ()
    """By model: predicted and measured times."""


def simulate(
    profiles: Sequence[Profile],
    *,
    grids: Sequence[str] = tuple(GRIDS),
    caps: Sequence[int] | None = None,
    budgets: Sequence[int] | None = None,
    name: str = "mix-v1",
    limit: int | None = None,
    batches: Mapping[str, Sequence[Batch]] | None = None,
    command: str = "",
) -> Study:
    """Every grid at every cap, for every model and for all.

    Args:
        profiles: the models; one of them a model.
        grids: names of `GRIDS`.
        caps: by default those of `CAPS` that every profile was measured up to.
        budgets: a list of one's own, as one more grid whose cap is its largest.
        name: of the workload.
        limit: its first so many batches.
        batches: by model, in place of the workload's.
        command: what the study names as its origin.

    Raises:
        ConfigError: no profile, a grid or workload that is unknown, a cap that a profile was not measured up to.
    """
    _check(profiles, grids, name)
    chosen = sorted(set(caps)) if caps else _default_caps(profiles)
    own = normalize_budgets(budgets) if budgets else ()
    for cap in (*chosen, *own[-1:]):
        beyond = next((profile for profile in profiles if profile.capped(cap) > profile.largest), None)
        if beyond is not None:
            raise ConfigError(
                f"cap={cap} is above {beyond.largest:,}, the most that the profile of {beyond.model} has; leave it "
                f"out, or measure again with --tokens up to it"
            )
    demands = [Demand(each, batches[each.model] if batches else batches_of(each, name, limit)) for each in profiles]
    outcomes, overall = [], []
    cells = [(grid, cap, GRIDS[grid]) for grid in grids for cap in chosen]
    cells += [(OWN, own[-1], _listed(own))] if own else []
    for grid, cap, levels in cells:
        found = [_outcome(demand, grid, cap, levels) for demand in demands]
        outcomes += [outcome for outcome, _ in found]
        overall.append(_overall(found))
    return Study(
        command=command,
        workload=name,
        batches=sum(len(demand.batches) for demand in demands),
        models=tuple(f"{profile.model} on {profile.device}" for profile in profiles),
        outcomes=tuple(outcomes),
        overall=tuple(overall),
        recommended={grid: recommend([o for o in overall if o.grid == grid]) for grid in _names(cells)},
        notes=tuple(_notes(profiles)),
    )


def recommend(outcomes: Sequence[Outcome]) -> int | None:
    """The smallest cap with no batch over 2 % slower than by the earlier rule; None if there is none."""
    return min((outcome.cap for outcome in outcomes if outcome.against().slower_share == 0), default=None)


def _check(profiles: Sequence[Profile], grids: Sequence[str], name: str) -> None:
    if not profiles:
        raise ConfigError("no profile is given; make one with `onereplay bench MODEL --profile --out DIR`")
    twice = [profile.model for place, profile in enumerate(profiles) if profile.model in _models(profiles[:place])]
    if twice:
        raise ConfigError(f"{twice[0]} has two profiles; give one a model, since all models count alike")
    for grid in grids:
        if grid not in GRIDS:
            raise ConfigError(f"grid={grid!r} is unknown; use {', '.join(GRIDS)}, or give a list with --budgets")
    if name not in WORKLOADS:
        raise ConfigError(f"workload={name!r} is unknown; use one of {', '.join(WORKLOADS)}")


def _models(profiles: Sequence[Profile]) -> list[str]:
    return [profile.model for profile in profiles]


def _default_caps(profiles: Sequence[Profile]) -> list[int]:
    """Those of `CAPS` that hold a tile of every model and that every profile was measured up to, if any."""
    least = max(times.unit for profile in profiles for times in profile.paths.values())
    known = [cap for cap in CAPS if cap >= least and all(each.capped(cap) <= each.largest for each in profiles)]
    return known or [min(profile.largest for profile in profiles)]


def _names(cells: Sequence[tuple[str, int, BudgetGrid]]) -> list[str]:
    return list(dict.fromkeys(grid for grid, _, _ in cells))


def _listed(levels: tuple[int, ...]) -> BudgetGrid:
    return lambda cap, unit: normalize_budgets(levels, item_tokens=unit)


def _notes(profiles: Sequence[Profile]) -> list[str]:
    top = max(levels()[-1] for _, levels in RULES.values())
    short = [profile for profile in profiles if profile.largest < top]
    return [
        f"{profile.model} was measured up to {profile.largest:,} tokens; times above, which the earlier rules' largest "
        f"budgets and eager forwards need, continue its last line"
        for profile in short
    ]


Ratios = Mapping[str, Floats]


def _outcome(demand: Demand, grid: str, cap: int, levels: BudgetGrid) -> tuple[Outcome, Ratios]:
    profile = demand.profile
    budgets = {path: levels(profile.capped(cap), times.unit) for path, times in profile.paths.items()}
    ours = demand.ours_ms(budgets)
    ratios = {way: earlier / ours.milliseconds for way, earlier in demand.earlier_ms.items()}
    outcome = Outcome(
        model=profile.model,
        grid=grid,
        cap=cap,
        levels=sum(map(len, budgets.values())),
        padding_fraction=ours.padding_fraction,
        eager_share=ours.eager_share,
        graph_mib=profile.graph_mib(cap),
        versus=tuple(_versus(way, values, demand.tokens) for way, values in ratios.items()),
        worst_tokens=int(demand.tokens[np.argmin(ratios[AGAINST])]),
    )
    return outcome, ratios


def _versus(way: str, ratios: Floats, tokens: Integers) -> Versus:
    large = ratios[tokens > LARGE_BATCH]
    return Versus(
        way=way,
        geomean=_geomean(ratios),
        geomean_large=_geomean(large) if len(large) else None,
        worst=float(ratios.min()),
        slower_share=float((ratios < 1 / (1 + SLOWER)).mean()),
    )


def _geomean(values: Floats) -> float:
    return float(np.exp(np.log(values).mean()))


def _overall(found: Sequence[tuple[Outcome, Ratios]]) -> Outcome:
    outcomes = [outcome for outcome, _ in found]
    worst = min(outcomes, key=lambda outcome: outcome.against().worst)
    return Outcome(
        model="all",
        grid=worst.grid,
        cap=worst.cap,
        levels=max(outcome.levels for outcome in outcomes),
        padding_fraction=_mean([outcome.padding_fraction for outcome in outcomes]),
        eager_share=_mean([outcome.eager_share for outcome in outcomes]),
        graph_mib=sum(outcome.graph_mib for outcome in outcomes),
        versus=tuple(_together([outcome.against(way) for outcome in outcomes]) for way in RULES),
        worst_tokens=worst.worst_tokens,
    )


def _together(several: Sequence[Versus]) -> Versus:
    """Of several models, each counting alike."""
    large = [one.geomean_large for one in several if one.geomean_large is not None]
    return Versus(
        way=several[0].way,
        geomean=math.exp(_mean([math.log(one.geomean) for one in several])),
        geomean_large=math.exp(_mean([math.log(value) for value in large])) if large else None,
        worst=min(one.worst for one in several),
        slower_share=_mean([one.slower_share for one in several]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
