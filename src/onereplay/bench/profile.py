"""Times of one model at many token counts: what `onereplay simulate` computes with.

For each path and each count: one replay of a graph of exactly that budget, and one eager forward. The clock is that of
`timing.measure` around the whole call (plan, metadata, copies, replay or forward, split), with pixels on the device.

A packed batch is made of images of `IMAGE_TOKENS` tokens and a rest, about what a mix of pictures is made of: one image
of 16,384 tokens would have sixteen times the attention. Tiles have one size. Local tiles of a multi-path model run
behind one global tile, whose own time is taken off.
"""

import bisect
import dataclasses
import functools
import gc
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onereplay import geometry
from onereplay.adapters import adapter_for
from onereplay.adapters.base import Adapter
from onereplay.adapters.multipath import LOCAL
from onereplay.adapters.packed import PackedAdapter
from onereplay.bench.grids import studied_levels
from onereplay.bench.inputs import Shape, processor_outputs, sized
from onereplay.bench.report import card_lines, number, table
from onereplay.bench.timing import Card, Timing, card, measure
from onereplay.config import DEFAULT_MAX_ITEMS, EncoderCudaGraphConfig
from onereplay.core.items import Modality
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Replay
from onereplay.core.stats import CaptureReport
from onereplay.encoder import load_model
from onereplay.errors import ConfigError

logger = logging.getLogger(__name__)

KIND = "onereplay profile 1"
"""What a file of a profile begins with."""
IMAGE_TOKENS = 1024
SECONDS = 0.05
"""Of the counted calls of one count and way, but at least five calls."""
_KEPT_OPTIONS = ("max_items_per_batch", "features", "tile_size")


@dataclass(frozen=True, slots=True)
class Point:
    """One batch of so many tokens on one path."""

    tokens: int
    items: int
    replay_ms: float | None
    """Of the budget of exactly these tokens; None if it was not captured."""
    replay_host_ms: float | None
    """Until the call returned; None on a CPU."""
    eager_ms: float
    eager_host_ms: float | None


@dataclass(frozen=True)
class PathTimes:
    """One path."""

    unit: int
    """Tokens that come and go together: 1, or those of a tile."""
    points: tuple[Point, ...]
    """Ascending."""

    @property
    def largest(self) -> int:
        """The most tokens that were measured."""
        return self.points[-1].tokens

    def replay_ms(self, budget: int) -> float:
        """Milliseconds of one replay of a budget; see `_line`."""
        return _line(budget, self._replays)

    def replay_host_ms(self, budget: int) -> float:
        """Milliseconds of the host in it; 0 where they are not known."""
        return _line(budget, self._hosts) if self._hosts else 0.0

    def eager_ms(self, tokens: int) -> float:
        """Milliseconds of one eager forward."""
        return _line(tokens, self._eagers)

    @functools.cached_property
    def _replays(self) -> tuple[tuple[int, float], ...]:
        return tuple((point.tokens, point.replay_ms) for point in self.points if point.replay_ms is not None)

    @functools.cached_property
    def _hosts(self) -> tuple[tuple[int, float], ...]:
        return tuple((point.tokens, point.replay_host_ms) for point in self.points if point.replay_host_ms is not None)

    @functools.cached_property
    def _eagers(self) -> tuple[tuple[int, float], ...]:
        return tuple((point.tokens, point.eager_ms) for point in self.points)


def _line(tokens: int, points: Sequence[tuple[int, float]]) -> float:
    """Straight lines between points; the first value below them, the last line's slope (never falling) above."""
    counts = [count for count, _ in points]
    place = bisect.bisect_left(counts, tokens)
    if place == 0:
        return points[0][1]
    (left, low), (right, high) = points[place - 1 : place + 1] if place < len(points) else _last_line(points)
    slope = (high - low) / (right - left)
    return low + slope * (tokens - left) if tokens <= right else high + max(slope, 0.0) * (tokens - right)


def _last_line(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """The last two points; of a single one, it and the origin."""
    return points[-2:] if len(points) > 1 else ((0, 0.0), points[0])


@dataclass(frozen=True)
class Capture:
    """What the graphs of all levels cost together; of an analytic profile, the estimate."""

    backend: str
    budgets: int
    dropped: int
    seconds: float
    static_mib: float
    """Input and output buffers, of the largest budget."""
    pool_mib: float
    """What the graphs hold beside them; as much as that of the largest budget alone."""

    @classmethod
    def of(cls, report: CaptureReport) -> "Capture":
        """From a manager's report."""
        return cls(
            backend=report.backend,
            budgets=sum(map(len, report.budgets.values())),
            dropped=sum(map(len, report.dropped.values())),
            seconds=report.seconds,
            static_mib=report.static_bytes / 2**20,
            pool_mib=report.pool_bytes / 2**20,
        )


@dataclass(frozen=True)
class Profile:
    """One model on one device."""

    command: str
    model: str
    device: str
    """The GPU's name, `CPU`, or the numbers of an analytic model."""
    card: Card | None
    """None for an analytic profile."""
    engine: str
    dtype: str
    attention: str
    rewrites: tuple[str, ...]
    options: dict[str, Any]
    """Of the encoder: those that change what a batch asks for."""
    merge: int | None
    """The side of a merged unit, of a packed model."""
    hidden_size: int
    """The width of a token."""
    max_batch_tokens: int
    """The most that the model puts into one batch: a higher cap is this one."""
    weight_mib: float
    launches: int | None
    """Kernels that an eager forward launches; None where nobody counted."""
    paths: dict[str, PathTimes]
    capture: Capture

    @property
    def largest(self) -> int:
        """The most tokens that every path was measured at."""
        return min(times.largest for times in self.paths.values())

    @property
    def config(self) -> EncoderCudaGraphConfig:
        """The encoder's options."""
        return EncoderCudaGraphConfig.from_mapping(self.options)

    def capped(self, cap: int) -> int:
        """What a cap is to this model."""
        return min(cap, self.max_batch_tokens)

    def graph_mib(self, cap: int) -> float:
        """Buffers and pool of graphs up to a cap: both are those of the largest budget, and proportional to it."""
        return (self.capture.static_mib + self.capture.pool_mib) * self.capped(cap) / self.largest

    def to_json(self) -> dict[str, Any]:
        """What a file of it holds."""
        return {"kind": KIND, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Any, origin: str = "the profile") -> "Profile":
        """The way back.

        Raises:
            ConfigError: it is no profile, or one of another version or with a part missing.
        """
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise ConfigError(
                f"{origin} is no profile ({KIND}); make one with `onereplay bench MODEL --profile --out DIR`"
            )
        try:
            fields = {name: value for name, value in data.items() if name != "kind"}
            paths = {name: _path_times(path) for name, path in fields.pop("paths").items()}
            where, capture = fields.pop("card"), Capture(**fields.pop("capture"))
            fields["rewrites"] = tuple(fields["rewrites"])
            found = cls(**fields, paths=paths, capture=capture, card=None if where is None else Card(**where))
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{origin} is a damaged profile ({error!s:.120}); measure it again") from error
        if not found.paths:
            raise ConfigError(f"{origin} is a damaged profile (no paths); measure it again")
        for name, times in found.paths.items():
            for point in times.points:
                _assert_measured(point, f"{origin}: path {name!r}")
            counts = [point.tokens for point in times.points]
            if not counts or counts != sorted(set(counts)) or all(p.replay_ms is None for p in times.points):
                raise ConfigError(f"{origin}: path {name!r} has counts {counts!s:.80}; they must ascend, with a replay")
        return found


def _assert_measured(point: "Point", where: str) -> None:
    """Whole tokens above zero, and times that a clock can give."""
    times = {"eager_ms": point.eager_ms, "replay_ms": point.replay_ms}
    if isinstance(point.tokens, bool) or not isinstance(point.tokens, int) or point.tokens < 1:
        raise ConfigError(f"{where} has tokens={point.tokens!r}; it must be a positive integer, measure it again")
    for name, value in times.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        if not number and not (name == "replay_ms" and value is None):
            raise ConfigError(f"{where} has {name}={value!r} at {point.tokens} tokens; measure it again")


def _path_times(data: Mapping[str, Any]) -> PathTimes:
    return PathTimes(data["unit"], tuple(Point(**point) for point in data["points"]))


def read_profile(path: Path) -> Profile:
    """The profile in a JSON file.

    Raises:
        ConfigError: the file cannot be read, or holds no profile.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:
        raise ConfigError(f"profile {path} is not JSON: {error}; give a file that `bench --profile` wrote") from error
    return Profile.from_json(data, f"profile {path}")


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def measure_profile(
    model: str,
    config: EncoderCudaGraphConfig | None = None,
    *,
    tokens: Sequence[int] | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    seconds: float = SECONDS,
    command: str = "",
    commit: str | None = None,
    progress: Callable[[str], None] = logger.info,
) -> Profile:
    """Capture every level once, and time a replay and an eager forward at each.

    Args:
        model: a hub id, a directory, `preset:NAME`.
        config: of the encoder; its budgets are replaced.
        tokens: the levels; by default `studied_levels`.
        device: where to run; CUDA if there is any.
        dtype: of the weights.
        seconds: of the counted calls of one count and way.
        command: what the profile names as its origin.
        commit: what the card names where git cannot.
        progress: told what was measured.

    Raises:
        OnereplayError: the model cannot be loaded, or the options are refused.
    """
    config = config or EncoderCudaGraphConfig()
    _refuse_budgets(config)
    loaded = load_model(model, device, dtype, config)
    sizes = adapter_for(loaded)
    sizes.configure(config)
    units = {path: sizes.unit(path) for path in sizes.paths()}
    levels = tuple(tokens) if tokens else studied_levels(list(units.values()), sizes.max_batch_tokens)
    bound = _items_bound(sizes, config, levels)
    adapter = adapter_for(loaded, config)
    try:
        with (
            torch.no_grad(),
            EncoderCudaGraphManager(
                adapter, dataclasses.replace(config, token_budgets=levels, max_items_per_batch=bound)
            ) as replaying,
        ):
            progress(str(replaying.capture()))
            eager = EncoderCudaGraphManager(adapter, config)
            paths = {path: _measured(path, replaying, eager, seconds, progress) for path in units}
            capture = Capture.of(replaying.report().capture)
    finally:
        adapter.rewritten.restore()
        gc.collect()
    where = card(adapter.device, commit)
    found = described(model, adapter, config, paths, capture)
    return dataclasses.replace(found, command=command, card=where, device=where.gpu or "CPU")


def _refuse_budgets(config: EncoderCudaGraphConfig) -> None:
    """The budgets of a profile are its counts.

    Raises:
        ConfigError: others are given.
    """
    for name in ("token_budgets", "max_token_budget"):
        if getattr(config, name) != getattr(EncoderCudaGraphConfig, name):
            raise ConfigError(
                f"{name}={getattr(config, name)}: a profile captures the counts that it measures; give --tokens instead"
            )


def _items_bound(adapter: Adapter[Any], config: EncoderCudaGraphConfig, levels: Sequence[int]) -> int | None:
    """Small tiles, one an item, must not run eagerly for being many; of a packed model the bound sizes graphs."""
    if adapter.engine == "packed":
        return config.max_items_per_batch
    return max(config.items_bound, max(levels))


def described(
    model: str, adapter: Adapter[Any], config: EncoderCudaGraphConfig, paths: dict[str, PathTimes], capture: Capture
) -> Profile:
    """A profile of these times, which still lacks where it comes from."""
    return Profile(
        command="",
        model=model,
        device="",
        card=None,
        engine=adapter.engine,
        dtype=str(adapter.dtype).removeprefix("torch."),
        attention=adapter.attention,
        rewrites=tuple(adapter.rewritten.names),
        options={name: getattr(config, name) for name in _KEPT_OPTIONS},
        merge=getattr(adapter, "merge", None),
        hidden_size=int(adapter.result_shape[-1]),
        max_batch_tokens=adapter.max_batch_tokens,
        weight_mib=sum(weight.nbytes for weight in adapter.weights) / 2**20,
        launches=None,
        paths=paths,
        capture=capture,
    )


def batch_of(adapter: Adapter[Any], path: str, tokens: int) -> Shape:
    """A batch of exactly these tokens on a path, as the module says.

    Args:
        adapter: the model.
        path: one of its paths.
        tokens: a multiple of the path's unit.
    """
    owner = getattr(adapter, "towers", {}).get(path, adapter)
    if isinstance(owner, PackedAdapter) and Modality.IMAGE in owner.modalities:
        longest, merge = owner.max_sequence_patches, owner.merge
        most = IMAGE_TOKENS if longest is None else min(IMAGE_TOKENS, longest // merge**2)
        full, rest = divmod(tokens, most)
        grids = [geometry.square_grid(part, merge) for part in [most] * full + [rest] * (rest > 0)]
    elif adapter.engine != "packed" and path == next(iter(adapter.paths())):
        return sized(adapter, tokens)
    else:
        grids = adapter.layouts(path, tokens, DEFAULT_MAX_ITEMS)[0][1]
    return Shape(f"{path} {tokens:,}", tuple((grid,) for grid in grids))


def _measured(
    path: str,
    replaying: EncoderCudaGraphManager[Any],
    eager: EncoderCudaGraphManager[Any],
    seconds: float,
    progress: Callable[[str], None],
) -> PathTimes:
    adapter: Adapter[Any] = replaying.adapter  # type: ignore[assignment]
    levels = [capacity.tokens for capacity in adapter.capacities(path, replaying.config)]
    behind_another = adapter.engine == "multi-path" and path == LOCAL
    before = _timed(adapter, sized(adapter, 1), replaying, eager, seconds) if behind_another else _Times()
    points = []
    for level in levels:
        shape = batch_of(adapter, path, level)
        times = _timed(adapter, shape, replaying, eager, seconds)
        points.append(times.less(before).point(level, len(shape.items), captured=times.budgets.get(path) == level))
        progress(f"{path} {level:,} tokens: replay {number(points[-1].replay_ms)}, eager {points[-1].eager_ms:.3g} ms")
    return PathTimes(adapter.unit(path), tuple(points))


@dataclass(frozen=True, slots=True)
class _Times:
    """Milliseconds of one batch, both ways; the host's are None where nobody measured them."""

    replay: float = 0.0
    replay_host: float | None = 0.0
    eager: float = 0.0
    eager_host: float | None = 0.0
    budgets: Mapping[str, int | None] = field(default_factory=dict)
    """Which budget each path replayed; None where it ran eagerly."""

    def less(self, other: "_Times") -> "_Times":
        """Without what another batch took."""
        return _Times(
            max(self.replay - other.replay, 0.0),
            _less(self.replay_host, other.replay_host),
            max(self.eager - other.eager, 0.0),
            _less(self.eager_host, other.eager_host),
            self.budgets,
        )

    def point(self, tokens: int, items: int, *, captured: bool) -> Point:
        """As one count of a path."""
        whole = captured and None not in self.budgets.values()
        replay, host = (self.replay, self.replay_host) if whole else (None, None)
        return Point(tokens, items, replay, host, self.eager, self.eager_host)


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one - other, 0.0)


def _timed(
    adapter: Adapter[Any],
    shape: Shape,
    replaying: EncoderCudaGraphManager[Any],
    eager: EncoderCudaGraphManager[Any],
    seconds: float,
) -> _Times:
    inputs = resident_inputs(adapter, shape)
    steps = replaying.plan(adapter.batch(**inputs)).steps
    budgets = {path: step.capacity.tokens if isinstance(step, Replay) else None for path, step in steps.items()}

    def timed(manager: EncoderCudaGraphManager[Any], inside: str) -> Timing:
        return measure(
            lambda: manager.encode(adapter.batch(**inputs)), adapter.device, inside=inside, repeats=20, seconds=seconds
        )

    ran, forward = timed(replaying, "replay"), timed(eager, "eager")
    return _Times(ran.best_ms.median, _host(ran), forward.best_ms.median, _host(forward), budgets)


def _host(timing: Timing) -> float | None:
    return timing.host_ms.median if timing.host_ms else None


def resident_inputs(adapter: Adapter[Any], shape: Shape) -> dict[str, Any]:
    """What the model takes, random pixels drawn on its device in its dtype."""
    inputs = processor_outputs(adapter, shape, adapter.dtype, adapter.device)
    return {
        name: value.to(adapter.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# A page
# ---------------------------------------------------------------------------------------------------------------------


def profile_page(profile: Profile) -> str:
    """The profile as Markdown."""
    cost = profile.capture
    lines = [
        f"# {profile.model}: replay and eager at many token counts",
        "",
        *(card_lines(profile.card) if profile.card else [f"- {profile.device}"]),
        f"- {profile.dtype}, attention {profile.attention}, rewrites {', '.join(profile.rewrites) or 'none'}, "
        f"{profile.weight_mib:,.0f} MiB of weights",
        f"- {cost.budgets} graphs ({cost.backend}), {cost.dropped} dropped, {cost.seconds:.1f} s, "
        f"{cost.static_mib:,.0f} MiB of buffers, {cost.pool_mib:,.0f} MiB of pool",
        f"- `{profile.command}`",
        "",
        f"Milliseconds are medians. Packed batches are images of {IMAGE_TOKENS:,} tokens and a rest; see",
        "`onereplay.bench.profile`.",
    ]
    for path, times in profile.paths.items():
        header = ("tokens", "items", "replay", "its host", "eager", "its host", "eager/replay")
        lines += ["", f"## {path}", "", *table(header, [_cells(point) for point in times.points])]
    return "\n".join(lines) + "\n"


def _cells(point: Point) -> list[str]:
    ratio = point.eager_ms / point.replay_ms if point.replay_ms else None
    times = (point.replay_ms, point.replay_host_ms, point.eager_ms, point.eager_host_ms, ratio)
    return [f"{point.tokens:,}", str(point.items), *map(number, times)]
