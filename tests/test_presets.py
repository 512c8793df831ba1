"""Presets are complete, explicit and independent of each other; the tiny ones run as whole models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from onereplay.errors import ConfigError, UnsupportedModelError
from onereplay.presets import Preset, get_preset, hf_config, preset_names

EVERY = [spec for name in preset_names() for spec in (name, f"{name}@tiny")]
TINY = ["qwen2_5_vl-7b@tiny", "internvl3-8b@tiny", "lfm2_vl-450m@tiny"]


def config_of(preset: Preset) -> Any:
    """Skips what the installed transformers is too old for."""
    try:
        return hf_config(preset)
    except UnsupportedModelError as err:
        pytest.skip(str(err))


def test_a_model_that_transformers_lacks_is_refused_with_the_version() -> None:
    newer = replace(get_preset("internvl3-8b"), config={"model_type": "of_tomorrow"})
    with pytest.raises(UnsupportedModelError, match=r"transformers \d.* has no model type 'of_tomorrow'; install"):
        hf_config(newer)


def written(preset: Preset) -> Mapping[str, Any]:
    """The encoder's part of what a preset writes: of a whole model, or all of a tower's configuration."""
    found: Mapping[str, Any] = next(
        (preset.config[name] for name in ("vision_config", "audio_config") if name in preset.config), preset.config
    )
    return found


def tower_of(preset: Preset) -> Any:
    """The same part of the configuration object."""
    config = config_of(preset)
    name = next((name for name in ("vision_config", "audio_config") if name in preset.config), None)
    return config if name is None else getattr(config, name)


def kept_as(value: Any, kept: Any) -> bool:
    """Whether an object has a written value; a mapping may have become a configuration of its own."""
    if isinstance(value, Mapping) and not isinstance(kept, Mapping):
        return all(kept_as(inner, getattr(kept, name)) for name, inner in value.items())
    return bool((list(kept) if isinstance(kept, tuple) else kept) == value)


def encoders_of(preset: Preset) -> list[Any]:
    """The tower's configuration, or those of the encoders that it is made of (DeepSeek-OCR)."""
    tower = tower_of(preset)
    return [tower] if hasattr(tower, "hidden_size") else [tower.sam_config, tower.encoder_config]


@pytest.mark.parametrize("spec", EVERY)
def test_config_object_keeps_every_vision_value(spec: str) -> None:
    preset = get_preset(spec)
    vision = tower_of(preset)
    for name, value in written(preset).items():
        if name == "dtype":
            continue
        assert kept_as(value, getattr(vision, name)), name


@pytest.mark.parametrize("spec", EVERY)
def test_no_size_is_left_to_a_class_default(spec: str) -> None:
    preset = get_preset(spec)
    defaults = type(tower_of(preset))()
    unwritten = set(defaults.to_dict()) - set(written(preset))
    sizes = {name for name in unwritten if name.endswith(("size", "depth", "layers", "heads", "patches", "channels"))}
    assert sizes <= {"chunk_size_feed_forward", "classifier_proj_size"}  # of Whisper's classifier, which is not run


@pytest.mark.parametrize("spec", EVERY)
def test_towers_fit_attention_kernels_and_their_language_model(spec: str) -> None:
    config, preset = config_of(get_preset(spec)), get_preset(spec)
    for tower in encoders_of(preset):
        width = getattr(tower, "embed_dim", tower.hidden_size)  # Qwen2-VL calls the width behind the merger hidden_size
        assert width % tower.num_attention_heads == 0
        assert width // tower.num_attention_heads % 8 == 0
        if hasattr(tower, "out_hidden_size"):
            assert tower.out_hidden_size == config.text_config.hidden_size


@pytest.mark.parametrize("spec", preset_names())
def test_every_assumed_name_is_a_value_of_the_preset(spec: str) -> None:
    preset = get_preset(spec)
    values = {**preset.config, "processor": preset.processor}
    for name in preset.assumed:
        assert _lookup(values, name) is not None, name
    assert preset.source
    assert "/" in preset.checkpoint


@pytest.mark.parametrize("spec", preset_names())
def test_tiny_form_keeps_the_structure(spec: str) -> None:
    full, tiny = get_preset(spec), get_preset(f"{spec}@tiny")
    assert _shape(full.config) == _shape(tiny.config)
    assert _shape(full.processor) == _shape(tiny.processor)
    for name in ("patch_size", "temporal_patch_size", "spatial_merge_size", "window_size", "hidden_act", "norm_type"):
        assert written(full).get(name) == written(tiny).get(name)
    layers = written(full).get("fullatt_block_indexes", [0])
    assert 0 < len(written(tiny).get("fullatt_block_indexes", [0])) <= len(layers)


def test_tiny_towers_keep_the_alignment_of_their_linear_layers() -> None:
    for name in preset_names():
        full, tiny = (written(get_preset(spec)) for spec in (name, f"{name}@tiny"))
        if "intermediate_size" in full:  # else a whole multiple of the width
            assert (full["intermediate_size"] % 8 == 0) == (tiny["intermediate_size"] % 8 == 0), name


def test_changing_one_preset_leaves_the_next_one_alone() -> None:
    first = get_preset("internvl3-1b")
    first.config["vision_config"]["hidden_size"] = 7
    first.processor["image_mean"][0] = 7.0
    again = get_preset("internvl3-1b")
    assert again.config["vision_config"]["hidden_size"] == 1024
    assert again.processor["image_mean"][0] == 0.485


@pytest.mark.parametrize("spec", ["internvl3-9b", "internvl3-8b@small", "internvl3-8b@", ""])
def test_unknown_name_is_refused_with_the_names_that_exist(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"internvl3-8b.*lfm2_vl-450m.*@tiny"):
        get_preset(spec)


@pytest.mark.parametrize("spec", TINY)
def test_tiny_whole_model_generates_from_an_image(spec: str) -> None:
    preset = get_preset(spec)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(hf_config(preset)).eval()
    assert type(model).__name__ == preset.architecture
    image, num_tokens = _one_image(preset)
    ids = torch.tensor([[1, *[preset.config["image_token_id"]] * num_tokens, 5]])
    if preset.model_type == "qwen2_5_vl":
        image["mm_token_type_ids"] = (ids == preset.config["image_token_id"]).long()
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **image, max_new_tokens=3, min_new_tokens=3, do_sample=False
    )
    assert out.shape == (1, ids.shape[1] + 3)


@pytest.mark.parametrize("spec", ["qwen2_5_vl-7b@tiny", "internvl3-8b@tiny", "internvl3-8b"])
def test_image_processor_takes_the_preset_and_matches_the_tower(spec: str, tmp_path: Path) -> None:
    preset = get_preset(spec)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preset.processor))
    try:
        processor = AutoImageProcessor.from_pretrained(tmp_path)
    except ImportError:
        pytest.skip("this version of transformers has no AutoImageProcessor without torchvision")
    pixels = processor([torch.zeros(3, 84, 112, dtype=torch.uint8).numpy()], return_tensors="pt")["pixel_values"]
    if preset.model_type == "internvl":
        assert list(pixels.shape[1:]) == [3, *preset.config["vision_config"]["image_size"]]
    else:
        assert pixels.shape == (6 * 8, 3 * 2 * 14 * 14)
        assert (processor.size["shortest_edge"], processor.size["longest_edge"]) == (3136, 12845056)


def test_import_is_light() -> None:
    code = "import sys, onereplay.presets; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _one_image(preset: Preset) -> tuple[dict[str, Any], int]:
    """Inputs of one small image and the number of its tokens."""
    match preset.model_type:
        case "qwen2_5_vl":
            return {"pixel_values": torch.randn(24, 1176), "image_grid_thw": torch.tensor([[1, 4, 6]])}, 6
        case "internvl":
            return {"pixel_values": torch.randn(1, 3, 56, 56)}, 4
        case _:
            mask = torch.ones(1, 24, dtype=torch.long)
            shapes = torch.tensor([[4, 6]])
            pixels = torch.randn(1, 24, 768)
            return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}, 6


def _lookup(values: Mapping[str, Any], dotted: str) -> Any:
    found: Any = values
    for name in dotted.split("."):
        found = found[name]
    return found


def _shape(value: Any) -> Any:
    """Names and types without sizes."""
    if isinstance(value, Mapping):
        return {name: _shape(inner) for name, inner in value.items()}
    return type(value).__name__
