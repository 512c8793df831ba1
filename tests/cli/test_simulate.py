"""`onereplay simulate`, and the profiles that `onereplay bench --profile` writes for it."""

import json
from pathlib import Path

import pytest

from onereplay.bench.simulate import simulate
from tests.bench.synthetic import profile
from tests.cli.conftest import QWEN, Run

GPU = "tflops=550,tb_s=4.1,launch_us=40,kernel_us=5"


@pytest.fixture
def profiles(tmp_path: Path) -> list[Path]:
    """Two files."""
    found = []
    for name in ("qwen2_5_vl-7b", "internvl3-8b"):
        found.append(tmp_path / f"{name}.json")
        found[-1].write_text(json.dumps(profile(model=f"preset:{name}").to_json()))
    return found


def test_the_command_is_the_library_on_the_files(profiles: list[Path], run: Run) -> None:
    printed = json.loads(run("simulate", *profiles, "--cap", "1024,5120", "--batches", 20, "--json").stdout)
    models = [profile(model=f"preset:{name}") for name in ("qwen2_5_vl-7b", "internvl3-8b")]
    study = simulate(models, caps=[1024, 5120], limit=20)
    assert printed["recommended"] == study.recommended
    assert [row["versus"][0]["geomean"] for row in printed["overall"]] == [
        outcome.versus[0].geomean for outcome in study.overall
    ]


def test_the_table_has_a_line_a_grid_and_cap_and_a_recommendation(profiles: list[Path], run: Run) -> None:
    shown = run("simulate", *profiles, "--cap", "1024,5120", "--grid", "49", "--batches", 20)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["49", "1,024", "17"], ["49", "5,120", "49"]]
    assert lines[-1].startswith("grid 49: ")


def test_page_json_and_plot_are_written(profiles: list[Path], tmp_path: Path, run: Run) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    done = run("simulate", *profiles, "--cap", "1024,2048", "--batches", 20, "--out", tmp_path / "out", "--plot")
    assert done.exit_code == 0
    written = {path.suffix: path for path in (tmp_path / "out").iterdir()}
    assert set(written) == {".json", ".md", ".png"}
    assert json.loads(written[".json"].read_text())["workload"] == "mix-v1"
    assert "preset:internvl3-8b" in written[".md"].read_text()
    assert written[".png"].stat().st_size > 1000


def test_a_gpu_on_paper_needs_no_profile(run: Run) -> None:
    done = run("simulate", "--gpu", GPU, "--model", "preset:internvl3-1b", "--batches", 20, "--cap", "2048", "--json")
    found = json.loads(done.stdout)
    assert found["models"] == ["preset:internvl3-1b on 550 TFLOP/s, 4.1 TB/s, 40 us a launch, 5 us a kernel"]
    assert found["outcomes"][0]["graph_mib"] > 0


def test_with_a_profile_and_a_gpu_predictions_are_shown_beside_measurements(profiles: list[Path], run: Run) -> None:
    shown = run("simulate", profiles[1], "--gpu", GPU, "--cap", "1024", "--batches", 5).stdout
    assert "preset:internvl3-8b, milliseconds" in shown
    assert "Predicted over measured: replays" in shown


def test_a_measured_profile_can_be_simulated(tmp_path: Path, run: Run) -> None:
    flags = ("--profile", "--tokens", "32,64", "--device", "cpu", "--out", tmp_path)
    assert run("bench", QWEN, *flags).exit_code == 0
    (path,) = tmp_path.glob("profile_qwen2_5_vl-3b@tiny_cpu_*.json")
    done = run("simulate", path, "--cap", "64", "--batches", 5, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["notes"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "nothing to simulate"),
        (("absent.json",), "cannot be read"),
        (("--model", "preset:internvl3-1b"), "give --gpu"),
        (("--gpu", "fast", "--model", "preset:internvl3-1b"), "is no number"),
        (("--gpu", GPU, "--model", "preset:nothing"), "no preset 'nothing'"),
        (("absent.json", "--grid", "50"), "use 36, 49"),
        (("absent.json", "--cap", "0"), "cap='0'; give positive integers"),
        (("absent.json", "--budgets", "64,x"), "budgets='64,x'; give positive integers"),
        (("absent.json", "--plot"), "give --out DIR too"),
    ],
)
def test_bad_flags_are_refused(flags: tuple[str, ...], message: str, run: Run) -> None:
    done = run("simulate", *flags)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())


def test_a_profile_takes_no_flags_of_other_benchmarks(run: Run) -> None:
    done = run("bench", QWEN, "--profile", "--workload", "mix-v1", "--repeats", 3)
    assert done.exit_code == 2
    assert "leave --workload, --repeats out" in " ".join(done.stderr.split())
