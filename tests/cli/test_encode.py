"""`onereplay encode`: what is written, what is reported, what is refused."""

import json
import stat
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from onereplay.cli.output import Entry
from onereplay.encoder import Encoder
from tests.cli.conftest import EAGER, INTERNVL, LFM2, QWEN, Run, index_of, picture


def film(path: Path, frames: int) -> Path:
    """A film of 64x64 pixels at 4 frames a second."""
    with av.open(str(path), "w") as container:
        track = container.add_stream("mpeg4", rate=4)
        track.width, track.height = 64, 64
        for number in range(frames):
            pixels = np.full((64, 64, 3), 20 * number, dtype=np.uint8)
            container.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(track.encode(None))
    return path


@pytest.mark.parametrize("model", [QWEN, INTERNVL])
def test_features_are_those_of_the_library_bit_for_bit(model: str, pictures: Path, tmp_path: Path, run: Run) -> None:
    result = run("encode", pictures, "-m", model, "-o", tmp_path / "out", "--seed", 3)
    assert result.exit_code == 0, result.output
    with Encoder.from_spec(model, seed=3) as encoder:
        expected = encoder.encode(sorted(pictures.iterdir()))
    for entry, features in zip(index_of(tmp_path / "out")["items"], expected, strict=True):
        written = load_file(tmp_path / "out" / entry["file"])[entry["key"]]
        assert torch.equal(written, features)
        assert (entry["tokens"], entry["hidden"], entry["dtype"]) == (*features.shape, "float32")


def test_single_format_is_one_file_with_the_same_features_by_name(pictures: Path, tmp_path: Path, run: Run) -> None:
    for layout in ("single", "per-file"):
        assert run("encode", pictures, *EAGER, "-o", tmp_path / layout, "--format", layout).exit_code == 0
    one = load_file(tmp_path / "single" / "features.safetensors")
    entries = index_of(tmp_path / "per-file")["items"]
    assert sorted(one) == [entry["name"] for entry in entries]
    assert {path.name for path in (tmp_path / "single").iterdir()} == {"features.safetensors", "index.json"}
    for entry in entries:
        assert torch.equal(one[entry["name"]], load_file(tmp_path / "per-file" / entry["file"])["features"])
    assert {(entry["file"], entry["key"] == entry["name"]) for entry in index_of(tmp_path / "single")["items"]} == {
        ("features.safetensors", True)
    }


def test_a_bad_file_is_reported_with_its_reason_and_the_rest_is_written(
    pictures: Path, tmp_path: Path, run: Run
) -> None:
    (pictures / "1b.png").write_bytes(b"not a picture")
    (pictures / "empty.jpg").touch()
    out = tmp_path / "out"
    result = run("encode", pictures, tmp_path / "absent.png", *EAGER, "-o", out)
    assert result.exit_code == 1
    entries = {entry["name"]: entry for entry in index_of(out)["items"]}
    assert list(entries) == ["0.png", "1.png", "1b.png", "2.png", "3.png", "empty.jpg", "absent.png"]
    reasons = {name: entry["error"] for name, entry in entries.items() if entry["error"]}
    assert "not an image" in reasons.pop("1b.png")
    assert reasons == {"empty.jpg": "it is empty", "absent.png": "no such file or directory"}
    for name, entry in entries.items():
        assert (out / f"{name}.safetensors").exists() == (entry["error"] is None)
    assert "1b.png: not an image" in result.stderr
    assert "4 written, 3 failed" in result.stdout


def test_a_header_and_the_index_say_what_the_features_are_and_that_weights_are_random(
    pictures: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    result = run("encode", pictures / "2.png", "-m", QWEN, "-o", out, "--seed", 5, "--dtype", "bfloat16")
    with safe_open(out / "2.png.safetensors", "pt") as file:
        header = file.metadata()
    assert header["weights"] == "random, seed 5"
    assert (header["model"], header["size"], header["tokens"]) == (QWEN, "300x200", "77")
    assert header["source"] == str(pictures / "2.png")
    index = index_of(out)
    assert (index["weights"], index["complete"], index["dtype"]) == ("random, seed 5", True, "bfloat16")
    assert index["items"][0]["steps"] == {"vision": {"budget": 80, "padding": 3}}
    assert "weights are random, seed 5" in result.stdout


def test_a_batch_that_no_budget_holds_is_listed_with_its_reason(pictures: Path, tmp_path: Path, run: Run) -> None:
    result = run("encode", pictures, "-m", QWEN, "-o", tmp_path / "out", "--token-budgets", "64")
    steps = [entry["steps"]["vision"] for entry in index_of(tmp_path / "out")["items"]]
    assert [step.get("budget") for step in steps] == [64, 64, None, 64]
    assert steps[2]["eager"] == "over the largest budget"
    assert "eager, over the largest budget" in result.stdout


def test_videos_are_sampled_as_the_flags_say(tmp_path: Path, run: Run) -> None:
    clip = film(tmp_path / "clip.mp4", frames=8)
    for flags, frames in (((), 4), (("--fps", "none", "--max-frames", "2"), 2)):
        out = tmp_path / f"out{frames}"
        assert run("encode", clip, "-m", INTERNVL, "-o", out, "--token-budgets", "4", *flags).exit_code == 0
        (entry,) = index_of(out)["items"]
        assert (entry["modality"], entry["size"]) == ("video", f"64x64, {frames} frames")
        assert entry["tokens"] == frames * 4


def test_inputs_of_one_name_do_not_overwrite_each_other(tmp_path: Path, run: Run) -> None:
    names = ("a/x.png", "b/x.png", "b/x.webp", "a/X.png")
    inputs = [picture(tmp_path / name, 64, 64, seed) for seed, name in enumerate(names)]
    for layout in ("per-file", "single"):
        out = tmp_path / layout
        assert run("encode", *inputs, *EAGER, "-o", out, "--format", layout).exit_code == 0
        entries = index_of(out)["items"]
        assert [entry["name"] for entry in entries] == ["a__x.png", "b__x.png", "x.webp", "X.png"]
        found = [load_file(out / entry["file"])[entry["key"]] for entry in entries]
        assert not any(torch.equal(one, other) for i, one in enumerate(found) for other in found[:i])


def test_an_earlier_run_is_kept_unless_overwrite_says_otherwise(pictures: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run("encode", pictures / "0.png", *EAGER, "-o", out).exit_code == 0
    (out / "mine.safetensors").touch()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused = run("encode", pictures / "1.png", *EAGER, "-o", out)
    assert refused.exit_code == 2
    assert "has index.json of an earlier run" in refused.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert run("encode", pictures / "1.png", *EAGER, "-o", out, "--overwrite").exit_code == 0
    assert {path.name for path in out.iterdir()} == {"1.png.safetensors", "index.json", "mine.safetensors"}


def test_a_file_that_no_index_lists_is_not_overwritten_either(pictures: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "0.png.safetensors").write_text("precious")
    result = run("encode", pictures, *EAGER, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "0.png.safetensors" in result.stderr
    assert (tmp_path / "out" / "0.png.safetensors").read_text() == "precious"


def test_an_index_cannot_make_overwrite_remove_files_elsewhere(pictures: Path, tmp_path: Path, run: Run) -> None:
    other, out = tmp_path / "other.safetensors", tmp_path / "out"
    other.touch()
    out.mkdir()
    (out / "notes.txt").touch()
    items = [{"file": file} for file in ("../other.safetensors", str(other), "notes.txt", None)]
    (out / "index.json").write_text(json.dumps({"items": items}))
    assert run("encode", pictures / "0.png", *EAGER, "-o", out, "--overwrite").exit_code == 0
    assert other.exists()
    assert (out / "notes.txt").exists()


def test_an_interrupted_run_exits_with_130_and_leaves_whole_files_and_an_index_that_says_so(
    pictures: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_each = Encoder.encode_each

    def interrupted(self: Encoder, *arguments: Any, **options: Any) -> Any:
        for number, encoded in enumerate(encode_each(self, *arguments, **options)):
            if number == 2:
                raise KeyboardInterrupt
            yield encoded

    monkeypatch.setattr(Encoder, "encode_each", interrupted)
    two, one = {"0.png.safetensors", "1.png.safetensors"}, {"features.safetensors"}
    for layout, files in (("per-file", two), ("single", one)):
        out = tmp_path / layout
        result = run("encode", pictures, *EAGER, "-o", out, "--format", layout)
        assert result.exit_code == 130
        assert result.stderr == "interrupted\n"
        index = index_of(out)
        assert not index["complete"]
        assert {path.name for path in out.iterdir()} == {*files, "index.json"}
        assert [load_file(out / entry["file"])[entry["key"]].shape for entry in index["items"]] == [(12, 32), (4, 32)]


def test_a_write_that_fails_leaves_neither_a_half_file_nor_a_temporary_one(
    pictures: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        if target.name == "1.png.safetensors":
            raise OSError(28, "No space left on device")
        source.rename(target)

    monkeypatch.setattr("onereplay.cli.output.os.replace", full)
    result = run("encode", pictures, *EAGER, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "1.png.safetensors cannot be written" in result.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"0.png.safetensors", "index.json"}
    assert [entry["name"] for entry in index_of(tmp_path / "out")["items"]] == ["0.png"]


def test_files_have_the_permissions_that_any_new_file_has(pictures: Path, tmp_path: Path, run: Run) -> None:
    run("encode", pictures / "0.png", *EAGER, "-o", tmp_path / "out")
    (tmp_path / "plain").touch()
    expected = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {expected}


def test_json_has_every_entry_and_the_report_and_quiet_prints_nothing(pictures: Path, tmp_path: Path, run: Run) -> None:
    summary = json.loads(run("encode", pictures, *EAGER, "-o", tmp_path / "a", "--json", "--limit", 3).stdout)
    assert (summary["written"], summary["failed"], summary["report"]["batches"]) == (3, 0, 3)
    index = index_of(tmp_path / "a")
    assert [{**entry, "batch_ms": None} for entry in summary["items"]] == [
        {**entry, "batch_ms": None} for entry in index["items"]
    ]
    assert set(index["items"][0]) == set(Entry.__dataclass_fields__)
    quiet = run("encode", pictures, *EAGER, "-o", tmp_path / "b", "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_a_processor_that_needs_an_absent_package_ends_with_the_install_line(
    pictures: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onereplay.preprocess.processors.has_torchvision", lambda: False)
    result = run("encode", pictures, "-m", LFM2, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.endswith('pip install "onereplay[torchvision]"\n')
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--fps", "0"), "fps is 0"),
        (("--fps", "fast"), "fps is fast"),
        (("--max-frames", "0"), "max_frames is 0"),
        (("--device", "gpu"), "device='gpu' is unknown"),
        (("--device", "cuda:99"), "device='cuda:99' is not there"),
        (("--seed", "1"), "--seed"),
        (("https://example.com/a.png",), "--allow-urls"),
    ],
)
def test_a_refused_option_is_one_line_and_makes_no_directory(
    flags: tuple[str, ...], message: str, pictures: Path, tmp_path: Path, run: Run
) -> None:
    result = run("encode", pictures, "-m", "./no-such-model", "-o", tmp_path / "out", *flags)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_no_readable_input_at_all_is_refused_before_the_model_is_looked_at(tmp_path: Path, run: Run) -> None:
    result = run("encode", tmp_path / "absent", "-m", "./no-such-model", "-o", tmp_path / "out")
    assert (result.exit_code, "no such file or directory" in result.stderr) == (2, True)


def test_a_model_that_is_nowhere_is_one_line(pictures: Path, tmp_path: Path, run: Run) -> None:
    for spec in (str(tmp_path / "in"), "preset:nothing", "./no-such-model"):
        result = run("encode", pictures, "-m", spec, "-o", tmp_path / "out")
        assert (result.exit_code, result.stderr.count("\n"), result.stdout) == (2, 1, "")
        assert result.stderr.startswith("error: ")
    refused = run("encode", pictures, *EAGER, "-o", tmp_path / "out", "--revision", "main")
    assert (refused.exit_code, "--revision" in refused.stderr) == (2, True)


def test_an_exception_that_is_a_bug_keeps_its_traceback(
    pictures: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Encoder, "encode_each", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("encode", pictures, *EAGER, "-o", tmp_path / "out")
