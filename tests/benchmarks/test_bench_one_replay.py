"""`bench_one_replay` runs on a CPU: the page and the JSON say what was measured."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.bench_one_replay import main

ARGUMENTS = [
    *("--presets", "qwen2_5_vl-7b@tiny", "internvl3-1b@tiny", "lfm2_vl-1.6b@tiny"),
    *("--device", "cpu", "--dtype", "float32", "--tokens", "64", "256", "--repeats", "3"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose a lot where other processes use the same cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_three_tiny_models_are_measured_in_three_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = main([*ARGUMENTS, "--max-token-budget", "128", "--out", str(tmp_path)])

    assert [model.preset for model in result.models] == ARGUMENTS[1:4]
    for model in result.models:
        steps = {row.batch: row.step for row in model.rows}
        assert steps["64"] == "replay 64"
        assert steps["256"] == "eager: over the largest budget"
        for row in model.rows:
            assert row.plain.resident.repeats == row.ours.resident.repeats == 3
            assert row.plain.resident.device_ms is None
            assert row.plain.from_host is None
            # float32 against float32: rounding in another order, 1e-6 a step over a few layers.
            assert row.error_ours is not None
            assert row.error_ours < 1e-5
            assert row.error_plain == pytest.approx(0, abs=1e-6)
            assert row.flops > 0
    page, data = (next(tmp_path.glob(f"one_replay_cpu_*.{kind}")) for kind in ("md", "json"))
    assert page.read_text(encoding="utf-8").strip() == capsys.readouterr().out.strip()
    assert json.loads(data.read_text(encoding="utf-8"))["models"][0]["rows"][0]["step"] == "replay 64"


def test_without_a_directory_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--presets", "internvl3-1b@tiny", "--device", "cpu", "--tokens", "8", "--repeats", "1"])
    printed = capsys.readouterr().out.strip().splitlines()
    assert printed[0] == "# One replay against plain transformers and eager"
    assert json.loads(printed[-1])["dtype"] == "float32"


@pytest.mark.parametrize("option", ["--tokens", "--repeats"])
def test_counts_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", option, "0"])
    assert "must be positive" in capsys.readouterr().err
