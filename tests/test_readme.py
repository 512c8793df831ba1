"""What README.md shows runs as it stands, offline and on a CPU; so do the examples and the command of `make demo`.

Comments that a reader of the page does not see steer this:

* `<!-- not run: why -->` before a block: it is not run. Every other Python and shell block is.
* `<!-- given: a, b -->` before a Python block: names that the text around it speaks of, from `GIVEN`.
* `<!-- output -->` before a text block: exactly what the shell block before it prints.

What needs weights runs with the small form of its preset, and checkpoint names stand for a small local checkpoint.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import transformers
from examples import accelerate_generate
from typer.testing import CliRunner

from onereplay import Encoder, checking
from onereplay.adapters import ADAPTERS
from onereplay.cli import app
from onereplay.config import ENVIRONMENT_PREFIX, REWRITES, EncoderCudaGraphConfig
from onereplay.core.plan import Reason
from onereplay.presets import get_preset, hf_config, preset_names

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PHOTOS = ROOT / "examples" / "photos"
NEEDS_NO_WEIGHTS = ("plan", "budgets", "models")
"""Commands that run with the full presets."""

# ---------------------------------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    code: str
    note: str
    """The comment before it, without its marks."""

    @property
    def where(self) -> str:
        """For print."""
        return f"{self.page.name}:{self.line}"

    @property
    def not_run(self) -> str:
        """Why it is not run; empty if it is."""
        return self.note.removeprefix("not run:").strip() if self.note.startswith("not run:") else ""


FENCE = re.compile(
    r"(?:^<!-- (?P<note>.*?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start("code")), m["language"], m["code"], m["note"] or "")
        for m in FENCE.finditer(text)
    ]


BLOCKS = blocks(README)
PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [block for block in BLOCKS if block.language == "sh"]
FOLLOWED_BY = {first: second for first, second in pairwise(BLOCKS) if second.note == "output"}


def by_place(block: Block) -> str:
    """The name of a test."""
    return block.where


# ---------------------------------------------------------------------------------------------------------------------
# What blocks run in
# ---------------------------------------------------------------------------------------------------------------------


def _model_and_inputs() -> dict[str, Any]:
    model = accelerate_generate.random_model()
    return {"model": model, "inputs": accelerate_generate.prompt(model, PHOTOS / "chelsea.png")}


def _encoder_of_one_rank() -> dict[str, Any]:
    """What `torchrun` would set for one process, and an encoder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    return {"encoder": Encoder.from_preset("internvl3-1b@tiny")}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "model, inputs": _model_and_inputs,
    "encoder": _encoder_of_one_rank,
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user who has a photo, a film and a directory of photos."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)
    shutil.copytree(PHOTOS, "photos")
    shutil.copy(PHOTOS / "rocket.jpg", "photo.jpg")
    with av.open("clip.mp4", "w") as film:
        track = film.add_stream("mpeg4", rate=4)
        track.width, track.height = 64, 64
        for number in range(8):
            pixels = np.full((64, 64, 3), 20 * number, dtype=np.uint8)
            film.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        film.mux(track.encode(None))
    return tmp_path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Qwen2.5-VL as `save_pretrained` leaves it, small and random."""
    path = tmp_path_factory.mktemp("checkpoint")
    preset = get_preset("qwen2_5_vl-7b@tiny")
    transformers.AutoModelForImageTextToText.from_config(hf_config(preset)).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(dict(preset.processor)))
    return path


def small(text: str, checkpoint: Path) -> str:
    """The text with small models in place of published ones."""
    for name in preset_names():
        text = re.sub(rf"(?<![\w/-]){re.escape(name)}(?![\w@-])", f"{name}@tiny", text)
    return text.replace("Qwen/Qwen2.5-VL-7B-Instruct", str(checkpoint))


def call(arguments: list[str]) -> str:
    """What `onereplay` prints with these arguments."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, without comments."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


# ---------------------------------------------------------------------------------------------------------------------
# Blocks run
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", PYTHON, ids=by_place)
def test_a_python_block_runs(block: Block, directory: Path, checkpoint: Path) -> None:
    if block.not_run:
        pytest.skip(block.not_run)
    names = GIVEN[block.note.removeprefix("given: ")]() if block.note else {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(small(block.code, checkpoint), block.where, "exec"), {"__name__": "__main__", **names})
    if "print(" in block.code:
        assert printed.getvalue()


@pytest.mark.parametrize("block", SHELL, ids=by_place)
def test_a_shell_block_runs_and_prints_what_the_page_says(
    block: Block, directory: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block.not_run:
        pytest.skip(block.not_run)
    monkeypatch.setattr(checking, "SMALL_BUDGETS", (16,))  # The claims of one budget are run elsewhere in full.
    printed = []
    for program, *arguments in commands(block):
        assert program == "onereplay", f"{block.where}: {program} is not run by this test"
        if arguments[0] not in NEEDS_NO_WEIGHTS:
            arguments = [small(word, checkpoint) for word in arguments]
        printed.append(call(arguments))
    if block in FOLLOWED_BY:
        assert "".join(printed) == FOLLOWED_BY[block].code


def test_blocks_are_found_and_each_is_run_or_says_why_not() -> None:
    assert len([block for block in PYTHON if not block.not_run]) >= 4
    assert len([block for block in SHELL if not block.not_run]) >= 4
    assert len(FOLLOWED_BY) == 2
    text = README.read_text(encoding="utf-8")
    assert len(BLOCKS) == text.count("\n```") // 2
    assert {block.language for block in BLOCKS} <= {"python", "sh", "text"}
    notes = [block.note for block in BLOCKS if block.note]
    assert all(note == "output" or note.startswith(("not run: ", "given: ")) for note in notes)
    assert [block.where for block in BLOCKS if block.not_run and block.code.lstrip().startswith("onereplay")] == []


# ---------------------------------------------------------------------------------------------------------------------
# Tables are complete
# ---------------------------------------------------------------------------------------------------------------------


def first_column(heading: str) -> list[str]:
    """The code in the first cells of the table below a heading of the README."""
    section = re.split(rf"^##+ {heading}$", README.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    return re.findall(r"^\| `(.*?)` \|", re.split(r"^## ", section, flags=re.MULTILINE)[0], flags=re.MULTILINE)


def test_the_options_are_all_there_in_order_with_their_defaults() -> None:
    assert first_column("Options") == list(EncoderCudaGraphConfig.option_names())
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", README.read_text(encoding="utf-8"), flags=re.MULTILINE))
    config = EncoderCudaGraphConfig()
    assert rows["max_token_budget"] == f"`{config.max_token_budget}`"
    assert rows["max_items_per_batch"] == f"`{config.items_bound}`"
    assert (rows["attention"], rows["backend"]) == (f"`{config.attention}`", f"`{config.backend}`")
    assert (rows["optimize"], config.optimize) == ("`auto`", None)
    assert all(f"`{name}`" in README.read_text(encoding="utf-8") for name in REWRITES)


def test_every_reason_of_an_eager_forward_is_explained() -> None:
    assert sorted(first_column("How it works")) == sorted(reason.value for reason in Reason)


def test_every_model_type_is_listed() -> None:
    section = README.read_text(encoding="utf-8").split("\n## Models\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    listed = {name for line in table for name in re.findall(r"`(\w+)`", line)}
    assert sorted(listed - {"wrap", "encode_inputs"}) == sorted(ADAPTERS)


# ---------------------------------------------------------------------------------------------------------------------
# Examples and make
# ---------------------------------------------------------------------------------------------------------------------


def printed_by(example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What an example prints, run as a program."""
    monkeypatch.setattr(sys, "argv", [example, *words])
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    return capsys.readouterr().out


def test_the_example_of_photos_prints_features_and_goes_on_after_a_bad_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "bad.png").write_bytes(b"not a picture")
    printed = printed_by("encode_photo.py", monkeypatch, capsys, "photo.jpg", "bad.png", "clip.mp4")
    assert "photo.jpg: (28, 32) torch.float32; vision: replay" in printed
    assert "bad.png: bad.png: not an image" in printed
    assert "clip.mp4: (16, 32)" in printed


def test_the_example_of_generate_says_the_same_with_graphs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = printed_by("accelerate_generate.py", monkeypatch, capsys)
    assert "vision: 1 replays" in printed
    assert "random weights say" in printed
    assert "the same without graphs: True" in printed


def test_the_example_of_an_engine_replays_two_batches_and_runs_one_eagerly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = printed_by("own_engine.py", monkeypatch, capsys)
    steps = [line.partition("vision: ")[2] for line in printed.splitlines() if line.startswith("[(")]
    assert [step.partition(" (")[0] for step in steps] == [
        "replay 64",
        "replay 256",
        "eager, over the largest budget",
    ]
    apart = [float(found) for found in re.findall(r"by itself: (\S+)", printed)]
    assert len(apart) == 3
    assert max(apart) < 1e-5  # Float32 sums of some hundred terms in another order.


def test_the_examples_call_random_weights_random() -> None:
    for example in (ROOT / "examples").glob("*.py"):
        assert "random weights" in example.read_text(encoding="utf-8").lower(), example.name


def make_would_run(*targets: str) -> str:
    """The commands of targets, one a line, whether or not these tests run inside `make test`."""
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "--no-print-directory", "-n", *targets]
    return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_command_of_make_demo_runs_twice(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = make_would_run("demo")
    assert "RANDOM" in shown
    program, *arguments = shlex.split(shown.splitlines()[-1])
    assert Path(program).name == "onereplay"
    arguments[arguments.index("--out") + 1] = str(directory / "features")
    arguments[arguments.index("--model") + 1] += "@tiny"
    monkeypatch.chdir(ROOT)
    for _ in range(2):
        printed = call(arguments)
        assert "3 written, 0 failed" in printed
        assert "weights are random" in printed
    assert len(list((directory / "features").glob("*.safetensors"))) == 3


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_target_that_is_named_somewhere_exists() -> None:
    named = set()
    for page in ("README.md", "CONTRIBUTING.md", ".pre-commit-config.yaml", "Makefile"):
        named |= set(
            re.findall(
                r"(?:^|[`\"]|entry: )make ([a-z][a-z-]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
            )
        )
    named |= set(re.findall(r"^step ([a-z-]+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "check", "format", "bench", "install"} <= named
    assert make_would_run(*sorted(named))
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
