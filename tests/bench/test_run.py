"""`onereplay bench` measures every way on one batch, says what it could not, and writes what it found."""

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onereplay import EncoderCudaGraphConfig
from onereplay.bench.page import page, plots
from onereplay.bench.run import Options, Result, Versus, run
from onereplay.bench.ways import WAYS
from onereplay.cli import app


@pytest.fixture(scope="module")
def result() -> Result:
    """A tiny model on the CPU, every way that a CPU has in seconds."""
    config = EncoderCudaGraphConfig(token_budgets=(16, 32), backend="traced")
    return run(
        Options(
            model="preset:internvl3-1b@tiny",
            workloads=("single", "mix-v1"),
            ways=("plain", "varlen", "eager", "replay"),
            tokens=(16, 48),
            batches=3,
            repeats=2,
            seconds=0.01,
            device="cpu",
            config=config,
        ),
        "the command",
    )


def test_every_way_is_timed_on_every_batch(result: Result) -> None:
    single, mix = result.workloads
    assert [row.tokens for row in single.rows] == [16, 48]
    assert len(mix.rows) == 3
    for row in (*single.rows, *mix.rows):
        assert set(row.timings) == {"plain", "varlen", "eager", "replay"}
        assert row.flops > 0


def test_the_step_says_what_the_rule_did(result: Result) -> None:
    fits, too_large = result.workloads[0].rows
    assert (fits.step, fits.padding_fraction) == ("16", 0.0)
    assert "eager" in too_large.step
    assert too_large.padding_fraction is None


def test_errors_are_against_the_stock_model_in_float32(result: Result) -> None:
    """In float32 all ways add up the same numbers: nothing but fp32 rounding is left."""
    for row in result.workloads[0].rows:
        assert row.error_ours is not None
        assert row.error_ours < 1e-5
        assert row.error_plain == 0


def test_ratios_are_those_of_the_rows(result: Result) -> None:
    mix = result.workloads[1]
    plain = next(one for one in mix.versus if one.way == "plain")
    ratios = [row.timings["plain"].best_ms.median / row.timings["replay"].best_ms.median for row in mix.rows]
    assert plain.worst == min(ratios)
    assert isinstance(plain, Versus)
    assert min(ratios) <= plain.geomean <= max(ratios)


def test_a_way_that_a_model_lacks_is_named_with_the_reason() -> None:
    config = EncoderCudaGraphConfig(token_budgets=(16,), backend="traced")
    options = Options("preset:lfm2_vl-450m@tiny", ways=("varlen", "replay"), tokens=(16,), seconds=0.01, config=config)
    found = run(dataclasses.replace(options, repeats=1, device="cpu"))
    assert "hands no offsets" in found.skipped["varlen"]
    assert "hands no offsets" in page(found)


def test_the_result_is_written_as_json_page_and_plots(result: Result, tmp_path: Path) -> None:
    assert json.loads(json.dumps(dataclasses.asdict(result)))["command"] == "the command"
    text = page(result)
    assert "# preset:internvl3-1b@tiny" in text
    assert "`the command`" in text
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert [path.stat().st_size > 1000 for path in plots(result, tmp_path, "x")] == [True, True]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--ways", "fastest", f"use {', '.join(WAYS)}"),
        ("--workload", "", "use single, cases, mix-v1, mix-log, videos"),
        ("--tokens", "64,x", "positive integers"),
    ],
)
def test_bad_flags_are_refused_before_weights_are_made(flag: str, value: str, message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "preset:internvl3-1b@tiny", flag, value])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
