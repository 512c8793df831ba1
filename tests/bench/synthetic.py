"""Profiles of made-up times, for tests of what is computed from them."""

from collections.abc import Callable, Mapping

from onereplay.bench.grids import studied_levels
from onereplay.bench.profile import Capture, PathTimes, Point, Profile

QWEN = "preset:qwen2_5_vl-7b"
Time = Callable[[int], float]


def per_token(tokens: int) -> float:
    """Padding costs what tokens cost, and nothing else costs anything."""
    return tokens / 100


def times(replay: Time = per_token, eager: Time = per_token, unit: int = 1, host: float | None = None) -> PathTimes:
    """A path whose every count has these times."""
    levels = [level for level in studied_levels([unit], 16_384) if level % unit == 0]
    return PathTimes(unit, tuple(Point(level, 1, replay(level), host, eager(level), host) for level in levels))


def profile(
    replay: Time = per_token,
    eager: Time = per_token,
    *,
    model: str = QWEN,
    max_batch_tokens: int = 16_384,
    host: float | None = None,
    paths: Mapping[str, PathTimes] | None = None,
) -> Profile:
    """A model with these times."""
    return Profile(
        command="made up",
        model=model,
        device="none",
        card=None,
        engine="packed",
        dtype="bfloat16",
        attention="auto",
        rewrites=(),
        options={"max_items_per_batch": None, "features": "auto", "tile_size": None},
        merge=2,
        hidden_size=3584,
        max_batch_tokens=max_batch_tokens,
        weight_mib=1290.0,
        launches=None,
        paths=dict(paths or {"vision": times(replay, eager, host=host)}),
        capture=Capture("cuda", 53, 0, 20.0, 260.0, 1500.0),
    )
