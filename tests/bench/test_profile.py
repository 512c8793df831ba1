"""Times at many counts: what is measured, read between the counts, and kept in a file."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onereplay import EncoderCudaGraphConfig
from onereplay.bench import profile as profile_module
from onereplay.bench.dispatch import half_octave_budgets
from onereplay.bench.grids import GRIDS, default_grid, steps_grid, studied_levels
from onereplay.bench.inputs import num_tokens
from onereplay.bench.profile import (
    IMAGE_TOKENS,
    PathTimes,
    Point,
    Profile,
    batch_of,
    measure_profile,
    profile_page,
    read_profile,
)
from onereplay.core.budgets import token_budgets
from onereplay.core.items import Modality
from onereplay.core.plan import Replay, plan
from onereplay.encoder import planner
from onereplay.errors import ConfigError
from tests.bench.synthetic import profile as made_up


@pytest.fixture(scope="module")
def measured() -> Profile:
    """A tiny packed model on the CPU, two levels."""
    config = EncoderCudaGraphConfig(backend="traced")
    return measure_profile("preset:qwen2_5_vl-3b@tiny", config, tokens=(16, 40), device="cpu", seconds=0.001)


def test_every_level_has_a_replay_and_an_eager_forward(measured: Profile) -> None:
    points = measured.paths["vision"].points
    assert [point.tokens for point in points] == [16, 40]
    assert all(point.replay_ms and point.replay_ms > 0 and point.eager_ms > 0 for point in points)
    assert all(point.replay_host_ms is None for point in points), "a CPU has one clock"
    assert (measured.capture.budgets, measured.capture.dropped, measured.capture.backend) == (2, 0, "traced")
    assert measured.card is not None
    assert (measured.device, measured.merge, measured.engine) == ("CPU", 2, "packed")


def test_a_profile_is_the_same_after_a_file(measured: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(measured.to_json()))
    assert read_profile(path) == measured


def test_the_page_has_a_row_a_count(measured: Profile) -> None:
    lines = profile_page(measured).splitlines()
    assert [line.split("|")[1].strip() for line in lines[-2:]] == ["16", "40"]


def test_a_model_of_two_paths_has_times_of_both_in_their_own_units() -> None:
    found = measure_profile("preset:deepseek_ocr@tiny", tokens=(64,), device="cpu", seconds=0.001)
    assert {path: [point.tokens for point in one.points] for path, one in found.paths.items()} == {
        path: [-(-64 // one.unit) * one.unit] for path, one in found.paths.items()
    }
    assert list(found.paths) == ["global", "local"]
    assert found.largest == 64


def test_small_tiles_are_no_reason_to_run_eagerly() -> None:
    """More tiles than `max_items_per_batch` in one batch, an item each: the profile still has their replay."""
    options = EncoderCudaGraphConfig(max_items_per_batch=2)
    found = measure_profile("preset:internvl3-1b@tiny", options, tokens=(64,), device="cpu", seconds=0.001)
    (point,) = found.paths["vision"].points
    assert point.tokens // found.paths["vision"].unit > 2
    assert point.replay_ms is not None
    assert found.config.items_bound == 2


@pytest.mark.parametrize("option", [{"token_budgets": (64,)}, {"max_token_budget": 1024}])
def test_budgets_of_the_encoder_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give --tokens instead"):
        measure_profile("preset:qwen2_5_vl-3b@tiny", EncoderCudaGraphConfig(**option), device="cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Levels and batches
# ---------------------------------------------------------------------------------------------------------------------


def test_grids_have_as_many_levels_as_their_names_say() -> None:
    assert {name: len(grid(5120, 1)) for name, grid in GRIDS.items()} == {"36": 36, "49": 49}
    assert default_grid(5120) == token_budgets()


@given(st.integers(64, 16_384))
def test_steps_above_1024_are_at_most_128(cap: int) -> None:
    levels = steps_grid(cap)
    assert levels[-1] == cap
    assert set(default_grid(cap)) <= set(levels)
    assert all(high - low <= 128 for low, high in pairwise(levels) if low >= 1024)


@given(st.integers(1, 2000), st.integers(2000, 16_384))
def test_tiles_have_whole_tiles_within_the_cap(unit: int, cap: int) -> None:
    for grid in GRIDS.values():
        levels = grid(cap, unit)
        assert levels[-1] <= cap
        assert all(level % unit == 0 for level in levels)
        assert list(levels) == sorted(set(levels))


def test_the_studied_levels_are_those_of_every_grid_and_of_the_earlier_rule() -> None:
    levels = studied_levels([1], 16_384)
    assert set(levels) == {*default_grid(5120), *steps_grid(5120), *half_octave_budgets()}
    assert len(levels) == 53
    assert studied_levels([1], 5120)[-1] == 5120


@pytest.mark.parametrize("name", ["qwen2_5_vl-7b", "lfm2_vl-1.6b", "internvl3-8b", "siglip-so400m-384"])
@pytest.mark.parametrize("tokens", [64, 896, 1024, 4608, 16_384])
def test_a_batch_has_exactly_its_tokens_in_images_of_at_most_a_mixs_size(name: str, tokens: int) -> None:
    adapter: Any = planner(f"preset:{name}", EncoderCudaGraphConfig())[0].adapter
    unit = adapter.unit("vision")
    whole = max(tokens // unit, 1) * unit
    shape = batch_of(adapter, "vision", whole)
    assert num_tokens(adapter, shape) == whole
    if adapter.engine == "packed":
        assert all(adapter.size(grid).tokens <= IMAGE_TOKENS for grid in shape.grids)


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl-7b", "qwen3_vl-8b", "glm4v-9b", "kimi_k25", "lfm2_vl-1.6b", "pixtral-12b"]
)
def test_a_batch_of_a_level_replays_the_budget_of_that_level(name: str) -> None:
    """In every dimension: sequences and windows too. Otherwise a profile would have no replay there."""
    levels = studied_levels([1], 16_384)
    preprocessor, capacities = planner(f"preset:{name}", EncoderCudaGraphConfig(token_budgets=levels))
    adapter: Any = preprocessor.adapter
    for level in levels:
        items = [adapter.item(Modality.IMAGE, item) for item in batch_of(adapter, "vision", level).items]
        step = plan(items, capacities).steps["vision"]
        assert isinstance(step, Replay), step
        assert step.capacity.tokens == level


# ---------------------------------------------------------------------------------------------------------------------
# Between the counts
# ---------------------------------------------------------------------------------------------------------------------


def some_times(*points: tuple[int, float | None]) -> PathTimes:
    return PathTimes(1, tuple(Point(tokens, 1, ms, None, ms or 0.0, None) for tokens, ms in points))


def test_times_are_straight_lines_between_counts_and_go_on_above() -> None:
    one = some_times((100, 2.0), (200, 4.0), (400, 5.0))
    assert [one.replay_ms(tokens) for tokens in (1, 100, 150, 300, 400, 600)] == [2.0, 2.0, 3.0, 4.5, 5.0, 6.0]


def test_a_budget_that_was_not_captured_is_between_its_neighbours() -> None:
    assert some_times((100, 2.0), (200, None), (300, 4.0)).replay_ms(200) == 3.0


def test_a_single_count_is_proportional_above_it() -> None:
    assert some_times((100, 2.0)).replay_ms(300) == 6.0


def test_times_above_the_largest_count_never_fall() -> None:
    assert some_times((100, 2.0), (200, 1.0)).replay_ms(400) == 1.0


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0.1, 10)), min_size=2, max_size=20, unique_by=lambda p: p[0]),
    st.integers(1, 1500),
)
def test_rising_times_rise_everywhere(points: list[tuple[int, float]], tokens: int) -> None:
    counts, times = sorted(count for count, _ in points), sorted(time for _, time in points)
    one = some_times(*zip(counts, times, strict=True))
    assert one.replay_ms(tokens) <= one.replay_ms(tokens + 1) + 1e-9  # rounding of doubles below 100


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def test_a_profile_keeps_options_that_change_sizes() -> None:
    kept = dataclasses.replace(made_up(), options={"max_items_per_batch": 8})
    assert Profile.from_json(kept.to_json()).config == EncoderCudaGraphConfig(max_items_per_batch=8)


def test_graph_memory_is_proportional_to_the_cap() -> None:
    whole = made_up()
    assert whole.graph_mib(whole.largest) == 1760
    assert whole.graph_mib(whole.largest // 2) == 880


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "onereplay bench"}, "is no profile"),
        ({"capture": {}}, "is a damaged profile"),
        ({"surprise": 1}, "is a damaged profile"),
        ({"paths": {"vision": {"unit": 1, "points": []}}}, "must ascend, with a replay"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_files_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(made_up().to_json() | change))
    with pytest.raises(ConfigError, match=message) as refused:
        read_profile(path)
    assert "x.json" in str(refused.value)


def test_a_file_that_is_absent_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "absent.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_profile(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no profile"):
        read_profile(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("eager_ms", float("nan")), ("eager_ms", 0), ("replay_ms", -5.0), ("replay_ms", "abc"), ("tokens", 64.5)],
)
def test_a_profile_with_a_time_that_no_clock_gives_is_refused(field: str, value: object) -> None:
    times: dict[str, object] = {"tokens": 64, "eager_ms": 2.0, "replay_ms": 1.0, field: value}
    with pytest.raises(ConfigError, match=f"{field}="):
        profile_module._assert_measured(SimpleNamespace(**times), "a profile")  # type: ignore[arg-type]
