"""The command as a whole, and those of its parts that need no pictures."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from onereplay import __version__, presets
from onereplay.adapters.registry import ADAPTERS
from onereplay.cli.options import _CONFIG_FLAGS
from onereplay.config import EncoderCudaGraphConfig, load_config
from onereplay.core.budgets import MAX_BATCH_TOKENS, token_budgets
from onereplay.errors import ConfigError
from tests.cli.conftest import INTERNVL, QWEN, Run, picture

NO_TORCH = """
import sys
from typer.testing import CliRunner
from onereplay.cli import app
result = CliRunner().invoke(app, sys.argv[1:])
heavy = {"torch", "transformers", "numpy", "safetensors.torch"} & set(sys.modules)
print(result.exit_code, sorted(heavy))
"""


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("encode", "--help"), ("budgets", "--json")])
def test_light_commands_do_not_import_torch(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "0 []\n"


def test_the_installed_entry_point_prints_plain_text_without_a_terminal() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    done = subprocess.run(
        [sys.executable, "-m", "onereplay.cli", "budgets"], capture_output=True, text=True, check=True, env=environment
    )
    grid, summary = done.stdout.splitlines()
    assert grid == " ".join(map(str, token_budgets()))
    assert summary == "36 budgets, 64 to 5,120 tokens"


def test_encode_as_a_process_ends_with_the_librarys_line_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("not a picture")
    done = subprocess.run(
        [sys.executable, "-m", "onereplay.cli", "encode", "bad.png", "-m", INTERNVL, "-o", "out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == ("failed: bad.png: not an image in a format that Pillow reads, or a damaged one\n")


def test_version_is_the_packages(run: Run) -> None:
    assert run("--version").stdout == f"onereplay {__version__}\n"


def test_every_option_of_the_config_is_a_flag_of_encode_and_plan(run: Run) -> None:
    assert tuple(_CONFIG_FLAGS) == EncoderCudaGraphConfig.option_names()
    for command in ("encode", "plan"):
        shown = run(command, "--help").stdout
        assert all(f"--{name.replace('_', '-')} " in shown for name in EncoderCudaGraphConfig.option_names())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_token_budget", "0"),
        ("max_token_budget", "many"),
        ("token_budgets", "64,-1"),
        ("token_budgets", ""),
        ("max_items_per_batch", "1.5"),
        ("max_frames_per_batch", "0"),
        ("attention", "flash"),
        ("backend", "inductor"),
        ("optimize", "nothing_like_this"),
    ],
)
@pytest.mark.parametrize("command", ["encode", "plan"])
def test_a_bad_option_has_one_message_from_flag_and_environment_before_anything_is_loaded(
    command: str, option: str, value: str, tmp_path: Path, run: Run
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(environment={}, flags={option: value})
    encode = ("encode", "absent.png", "-m", "./no-such-model", "-o", tmp_path / "out")
    arguments = encode if command == "encode" else ("plan", "./no-such-model", "absent.png")
    by_flag = run(*arguments, f"--{option.replace('_', '-')}={value}")
    by_environment = run(*arguments, env={f"ONEREPLAY_{option.upper()}": value})
    assert by_flag.exit_code == by_environment.exit_code == 2
    assert by_flag.stderr == by_environment.stderr == f"error: {refused.value}\n"
    assert not (tmp_path / "out").exists()


def test_flags_override_a_config_file_and_none_lifts_the_cap(tmp_path: Path, run: Run) -> None:
    large = picture(tmp_path / "large.png", 900, 900)
    (tmp_path / "options.toml").write_text("max_token_budget = 512\n")
    config = ("--config", tmp_path / "options.toml", "--json")
    for flags, budget in ((), None), (("--max-token-budget", "none"), 1024):
        batches = json.loads(run("plan", QWEN, large, *config, *flags).stdout)["batches"]
        assert batches[0]["steps"]["vision"].get("budget") == budget


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), token_budgets()),
        (("--max", "4000"), token_budgets(maximum=4000)),
        (("--min", "100", "--max", "none"), token_budgets(100, MAX_BATCH_TOKENS)),
        (("--item-tokens", "256"), token_budgets(item_tokens=256)),
    ],
)
def test_budgets_are_the_librarys(flags: tuple[str, ...], expected: tuple[int, ...], run: Run) -> None:
    printed = json.loads(run("budgets", *flags, "--json").stdout)
    assert printed == {"budgets": list(expected), "count": len(expected)}


@pytest.mark.parametrize("flags", [("--max", "0"), ("--max", "x"), ("--min", "0"), ("--item-tokens", "-1")])
def test_budgets_refuse_what_the_library_refuses(flags: tuple[str, ...], run: Run) -> None:
    result = run("budgets", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give a positive integer" in result.stderr


def test_models_lists_every_adapter_and_preset(run: Run) -> None:
    listed = json.loads(run("models", "--json").stdout)
    assert {row["model_type"]: row["adapter"] for row in listed["models"]} == ADAPTERS
    assert [row["name"] for row in listed["presets"]] == [f"preset:{name}" for name in presets.preset_names()]
    for row in listed["presets"]:
        preset = presets.get_preset(row["name"].removeprefix("preset:"))
        assert (row["checkpoint"], tuple(row["assumed"])) == (preset.checkpoint, preset.assumed)
        assert bool(row["tokens"]) != bool(row["unknown"])
    tokens = {row["name"]: row["tokens"].get("448x448") for row in listed["presets"]}
    assert tokens["preset:internvl3-8b"] == tokens["preset:qwen2_5_vl-7b"] == 256


def test_models_table_names_what_is_assumed_and_why_tokens_are_not_known(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onereplay.preprocess.processors.has_torchvision", lambda: False)
    shown = run("models").stdout
    assert "OpenGVLab/InternVL3-8B-hf" in shown
    assert "preset:qwen2_5_vl-3b: vision_config.hidden_size" in shown
    assert 'pip install "onereplay[torchvision]"' in shown
    assert "random weights" in shown


def _checking(monkeypatch: pytest.MonkeyPatch, *passed: bool) -> list[dict[str, Any]]:
    """A stand-in for the self-test whose claims hold or not; gives the calls that it got."""
    from onereplay.checking import CheckResult

    calls: list[dict[str, Any]] = []

    def check_model(spec: str, **options: Any) -> list[CheckResult]:
        calls.append({"spec": spec, **options})
        options["progress"]("claim 0")
        return [CheckResult(f"claim {number}", ok, "as measured") for number, ok in enumerate(passed)]

    module = types.ModuleType("onereplay.checking")
    module.__dict__.update(check_model=check_model, CheckResult=CheckResult)
    monkeypatch.setitem(sys.modules, "onereplay.checking", module)
    return calls


@pytest.mark.parametrize(("passed", "code"), [((True, True), 0), ((True, False), 1), ((), 1)])
def test_check_exits_with_1_unless_every_claim_holds(
    passed: tuple[bool, ...], code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _checking(monkeypatch, *passed)
    result = run("check", INTERNVL, "--backend", "traced", "--seed", 3, "--device", "cpu")
    assert result.exit_code == code
    assert [line.split()[0] for line in result.stdout.splitlines()[1:-1]] == [("FAIL", "pass")[ok] for ok in passed]
    assert (calls[0]["backend"], calls[0]["seed"], calls[0]["device"]) == ("traced", 3, "cpu")
    listed = json.loads(run("check", INTERNVL, "--json").stdout)
    assert (listed["passed"], [claim["passed"] for claim in listed["claims"]]) == (code == 0, list(passed))


def test_check_refuses_a_bad_backend_as_every_entry_point_does(run: Run) -> None:
    with pytest.raises(ConfigError) as refused:
        EncoderCudaGraphConfig(backend="inductor")
    result = run("check", "./no-such-model", "--backend", "inductor")
    assert (result.exit_code, result.stderr) == (2, f"error: {refused.value}\n")


def test_check_holds_for_a_tiny_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onereplay.checking.SMALL_BUDGETS", (64,))
    result = run("check", INTERNVL)
    assert result.exit_code == 0, result.output
    assert "claims hold" in result.stdout
