"""Small pictures, a film, and the command run in this process."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from onereplay.cli import app

Run = Callable[..., Result]
QWEN, INTERNVL, LFM2 = "preset:qwen2_5_vl-3b@tiny", "preset:internvl3-1b@tiny", "preset:lfm2_vl-450m@tiny"
EAGER = ("--model", QWEN, "--token-budgets", "1")
"""Every picture runs eagerly, alone: for tests of everything but replays, since recording one takes a second."""


@pytest.fixture(autouse=True)
def _no_options_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ONEREPLAY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def run() -> Run:
    """Runs `onereplay` with arguments; exceptions that are bugs are raised."""

    def call(*arguments: object, env: dict[str, str] | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env, catch_exceptions=False)

    return call


def picture(path: Path, width: int, height: int, seed: int = 0) -> Path:
    """Noise, so that no two pictures have the same features."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A directory of four pictures, of 12, 4, 77 and 14 tokens to Qwen2.5-VL."""
    sizes = [(120, 80), (64, 64), (300, 200), (200, 56)]
    for number, (width, height) in enumerate(sizes):
        picture(tmp_path / "in" / f"{number}.png", width, height, seed=number)
    return tmp_path / "in"


def index_of(directory: Path) -> dict[str, Any]:
    """The index that a run wrote."""
    content: dict[str, Any] = json.loads((directory / "index.json").read_text())
    return content
