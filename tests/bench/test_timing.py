"""The clock: what it counts, when it stops, and the card. No claim about a duration."""

import gc

import pytest
import torch

from onereplay.bench.timing import MAX_WARMUP, MIN_REPEATS, Card, Spread, card, measure

CPU = torch.device("cpu")


def test_a_spread_is_median_and_p99_in_milliseconds() -> None:
    spread = Spread.of([0.001 * n for n in range(1, 102)])
    assert spread.median == pytest.approx(51)
    assert spread.p99 == pytest.approx(100)


def test_counted_calls_come_after_the_warm_up() -> None:
    calls = []
    timing = measure(lambda: calls.append(1), CPU, inside="an append", repeats=7)
    assert timing.repeats == 7
    assert len(calls) == 7 + MAX_WARMUP
    assert timing.inside == "an append"


def test_a_slow_call_runs_five_times_however_little_time_there_is() -> None:
    calls = []
    timing = measure(lambda: calls.append(1), CPU, inside="an append", repeats=50, seconds=0.0)
    assert timing.repeats == MIN_REPEATS
    assert len(calls) == MIN_REPEATS + 1


def test_on_a_cpu_there_is_the_wall_time_alone() -> None:
    timing = measure(lambda: None, CPU, inside="nothing", repeats=3)
    assert timing.device_ms is None
    assert timing.host_ms is None
    assert timing.peak_mib is None
    assert timing.best_ms == timing.wall_ms


def test_the_garbage_collector_is_off_inside_and_back_on_after() -> None:
    seen = []
    measure(lambda: seen.append(gc.isenabled()), CPU, inside="a look", repeats=3)
    assert seen[-3:] == [False] * 3
    assert gc.isenabled()


def test_the_card_names_versions_and_the_processor() -> None:
    here = card(CPU)
    assert here.torch == torch.__version__
    assert here.transformers[0].isdigit()
    assert here.cpu
    assert here.device_slug == "cpu"


@pytest.mark.parametrize(
    ("gpu", "slug"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("", "cpu")]
)
def test_a_slug_is_short_and_safe_in_a_file_name(gpu: str, slug: str) -> None:
    made = Card(gpu, "", "", 1, "", "", "", "", "", "", "")
    assert made.device_slug == slug
