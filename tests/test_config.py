"""Options: one meaning from every entry point, bad values refused with the value and the fix."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onereplay.config import EncoderCudaGraphConfig, load_config
from onereplay.core.budgets import token_budgets
from onereplay.errors import ConfigError

BAD: list[tuple[str, Any, str]] = [
    ("max_token_budget", 0, "is not positive"),
    ("max_token_budget", -64, "is not positive"),
    ("max_token_budget", True, "is not an integer"),
    ("max_token_budget", 64.5, "is not an integer"),
    ("max_items_per_batch", 0, "is not positive"),
    ("max_frames_per_batch", -1, "is not positive"),
    ("token_budgets", [], "captures nothing"),
    ("token_budgets", [64, 0], "is not positive"),
    ("token_budgets", [True], "is not an integer"),
    ("attention", "flash", "use one of auto, short, fa2, fa4, reference"),
    ("backend", "inductor", "use one of auto, cuda, traced"),
    ("optimize", 5, "is not a list"),
    ("optimize", ["nothing_like_this"], "is unknown"),
    ("features", "pooled", "use one of auto, embedding, rows"),
    ("tile_size", 0, "is not positive"),
    ("tile_size", [224, 224, 3], "is no size"),
    ("tile_size", [], "is no size"),
]


@pytest.mark.parametrize(("name", "value", "rule"), BAD)
def test_a_bad_value_is_refused_from_keyword_and_file_alike(name: str, value: Any, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rule):
        EncoderCudaGraphConfig(**{name: value})
    file = tmp_path / "options.json"
    file.write_text(json.dumps({name: value}))
    with pytest.raises(ConfigError, match=rule):
        load_config(file=file, environment={})


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("max_token_budget", "0", "is not positive"),
        ("max_token_budget", "-64", "is not positive"),
        ("max_token_budget", "true", "is not an integer"),
        ("max_token_budget", "", "is not an integer"),
        ("token_budgets", "", "captures nothing"),
        ("token_budgets", "64,x", "is not an integer"),
        ("attention", "flash", "use one of"),
        ("tile_size", "224x", "is not an integer"),
        ("tile_size", "2x2x2", "is no size"),
    ],
)
def test_a_bad_value_is_refused_from_environment_and_flag_alike(name: str, text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        load_config(environment={f"ONEREPLAY_{name.upper()}": text})
    with pytest.raises(ConfigError, match=rule):
        load_config(environment={}, flags={name: text})


def test_an_unknown_option_is_refused_from_every_entry_point_with_the_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("max_budget = 64\n")
    calls: list[Callable[[], object]] = [
        lambda: EncoderCudaGraphConfig.from_mapping({"max_budget": 64}),
        lambda: load_config(file=file, environment={}),
        lambda: load_config(environment={"ONEREPLAY_MAX_BUDGET": "64"}),
        lambda: load_config(environment={}, flags={"max_budget": 64}),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"unknown option max_budget in .*max_token_budget"):
            call()


def test_a_flag_overrides_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("[onereplay]\nmax_token_budget = 512\nmax_items_per_batch = 8\nattention = 'fa2'\n")
    environment = {"ONEREPLAY_CONFIG": str(file), "ONEREPLAY_MAX_ITEMS_PER_BATCH": "16", "OTHER": "x"}
    assert load_config(environment=environment, flags={"attention": "auto", "backend": None}) == (
        EncoderCudaGraphConfig(max_token_budget=512, max_items_per_batch=16, attention="auto")
    )


def test_lists_none_and_names_parse_the_same_from_text() -> None:
    environment = {"ONEREPLAY_TOKEN_BUDGETS": "128, 64,64", "ONEREPLAY_BACKEND": "traced"}
    assert load_config(environment=environment) == EncoderCudaGraphConfig(token_budgets=(64, 128), backend="traced")
    assert load_config(environment={"ONEREPLAY_MAX_TOKEN_BUDGET": "none"}).max_token_budget is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "x", "use .toml or .json"),
        ("a.json", "{", "is not valid JSON"),
        ("a.toml", "=", "is not valid TOML"),
        ("a.json", "[1]", "holds a list"),
    ],
)
def test_a_bad_file_is_refused_by_name(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(file=tmp_path / name, environment={})


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        load_config(file=tmp_path / "none.toml", environment={})


def test_a_list_and_a_cap_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradict"):
        EncoderCudaGraphConfig(token_budgets=(64,), max_token_budget=512)


def test_the_ladder_is_the_grid_under_the_smaller_of_cap_and_model_maximum() -> None:
    assert EncoderCudaGraphConfig().ladder(16_384) == token_budgets()
    assert EncoderCudaGraphConfig().ladder(1000)[-1] == 1000
    assert EncoderCudaGraphConfig(max_token_budget=None).ladder(16_384) == token_budgets(64, 16_384)
    assert EncoderCudaGraphConfig(max_token_budget=48).ladder(16_384) == (48,)
    assert EncoderCudaGraphConfig(token_budgets=(64, 300)).ladder(16_384, 256) == (256, 512)


def test_a_cap_below_one_tile_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(ConfigError, match="raise it to at least 256"):
        EncoderCudaGraphConfig(max_token_budget=255).ladder(16_384, 256)


def test_a_size_is_a_side_or_height_and_width_from_every_entry_point() -> None:
    assert EncoderCudaGraphConfig().tile_sides is None
    for size, sides in ((518, (518, 518)), ((480, 640), (480, 640)), ([480, 640], (480, 640))):
        assert EncoderCudaGraphConfig(tile_size=size).tile_sides == sides  # type: ignore[arg-type]
    for text, sides in (("518", (518, 518)), ("480x640", (480, 640)), ("480X640", (480, 640))):
        assert load_config(environment={}, flags={"tile_size": text}).tile_sides == sides


def test_slots_are_the_larger_of_items_and_frames() -> None:
    assert EncoderCudaGraphConfig().sequence_slots == 64
    assert EncoderCudaGraphConfig(max_items_per_batch=8).sequence_slots == 8
    assert EncoderCudaGraphConfig(max_items_per_batch=8, max_frames_per_batch=128).sequence_slots == 128


def test_grid_plan_and_config_need_no_torch() -> None:
    code = (
        "import sys; import onereplay.config, onereplay.core.plan, onereplay.core.budgets; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
