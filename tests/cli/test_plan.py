"""`onereplay plan`: the same batches and budgets as `onereplay encode`, without running anything."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from onereplay import loading
from onereplay.encoder import Encoder
from tests.cli.conftest import EAGER, INTERNVL, LFM2, QWEN, Run, index_of, picture


@pytest.mark.parametrize(
    ("model", "flags"),
    [(QWEN, ()), (QWEN, ("--token-budgets", "16,64")), (INTERNVL, ("--max-items-per-batch", "2"))],
)
def test_plan_says_what_encode_then_does(
    model: str, flags: tuple[str, ...], pictures: Path, tmp_path: Path, run: Run
) -> None:
    (pictures / "0b.png").write_bytes(b"broken: it ends a batch")
    inputs = (pictures / "1.png", tmp_path / "absent.png", pictures)
    planned = run("plan", model, *inputs, *flags, "--json")
    encoded = run("encode", *inputs, "-m", model, "-o", tmp_path / "out", "--json", *flags)
    assert (planned.exit_code, encoded.exit_code) == (1, 1)
    plan, summary = json.loads(planned.stdout), json.loads(encoded.stdout)
    for item, entry in zip(plan["items"], summary["items"], strict=True):
        assert {name: item[name] for name in ("path", "modality", "size", "tokens", "error")} == {
            name: entry[name] for name in ("path", "modality", "size", "tokens", "error")
        }
    steps = {place: batch["steps"] for batch in plan["batches"] for place in batch["items"]}
    assert [steps.get(place) for place in range(len(plan["items"]))] == [entry["steps"] for entry in summary["items"]]
    totals, report = plan["totals"], summary["report"]
    assert (totals["batches"], totals["padding_tokens"]) == (report["batches"], report["padding_tokens"])
    assert totals["padding_fraction"] == report["padding_fraction"]
    clocks = [entry["batch_ms"] for entry in summary["items"] if entry["steps"]]
    assert _sizes(plan) == [len(list(group)) for _, group in groupby(clocks)]


def _sizes(plan: Any) -> list[int]:
    return [len(batch["items"]) for batch in plan["batches"]]


def test_plan_loads_no_weights(pictures: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("weights")

    for owner, name in ((loading, "vision_model"), (loading, "load_vision_model"), (Encoder, "__init__")):
        monkeypatch.setattr(owner, name, refuse)
    assert run("plan", "preset:qwen2_5_vl-72b", pictures).exit_code == 0


def test_one_batch_plans_all_files_together(pictures: Path, run: Run) -> None:
    flags = ("--token-budgets", "64,96", "--json")
    assert _sizes(json.loads(run("plan", QWEN, pictures, *flags).stdout)) == [3, 1]
    (batch,) = json.loads(run("plan", QWEN, pictures, *flags, "--one-batch").stdout)["batches"]
    assert batch["items"] == [0, 1, 2, 3]
    assert batch["steps"]["vision"]["eager"] == "over the largest budget"


def test_the_table_has_a_line_an_item_a_line_a_batch_and_totals(pictures: Path, tmp_path: Path, run: Run) -> None:
    picture(tmp_path / "in" / "[red]long name that no table cuts short, however long it may be.png", 64, 64)
    result = run("plan", QWEN, pictures, "--max-items-per-batch", 3)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert lines[1].split()[2:] == ["120x80", "12", "1"]
    assert "[red]long name that no table cuts short, however long it may be.png  64x64" in result.stdout
    assert "#1 to #3" in result.stdout
    assert "replay 96" in result.stdout
    assert lines[-1].startswith("5 items, 0 failed; 111 tokens in 2 batches: 2 replayed, 0 eager; 30.6% padding")


def test_a_packages_absence_ends_the_plan_with_the_install_line(
    pictures: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onereplay.preprocess.processors.has_torchvision", lambda: False)
    result = run("plan", LFM2, pictures)
    assert result.exit_code == 2
    assert 'pip install "onereplay[torchvision]"' in result.stderr


def test_encode_writes_nothing_that_plan_did_not_list(pictures: Path, tmp_path: Path, run: Run) -> None:
    plan = json.loads(run("plan", QWEN, pictures, "--json", "--limit", 2).stdout)
    run("encode", pictures, *EAGER, "-o", tmp_path / "out", "--limit", 2)
    assert [item["path"] for item in plan["items"]] == [entry["path"] for entry in index_of(tmp_path / "out")["items"]]
