"""Workloads are the same for everyone, and have the sizes that they say."""

from typing import Any

import pytest
import torch

from onereplay.adapters import adapter_class
from onereplay.adapters.base import Adapter
from onereplay.bench.inputs import MIX_MAX_TOKENS, num_tokens, picture, processor_outputs, sized, workload
from onereplay.geometry import Grid
from onereplay.presets import get_preset, hf_config

NAMES = ("qwen2_5_vl-7b", "internvl3-8b", "lfm2_vl-1.6b")


def adapter_of(name: str) -> Adapter[Any]:
    """Without weights."""
    preset = get_preset(name)
    return adapter_class(preset.model_type)(hf_config(preset))


@pytest.mark.parametrize("name", NAMES)
def test_sized_batches_have_the_tokens_that_were_asked_for_and_tiles_at_least_one(name: str) -> None:
    adapter = adapter_of(name)
    unit = adapter.unit("vision")
    found = [num_tokens(adapter, sized(adapter, tokens)) for tokens in (64, 128, 5120, 8192)]
    assert found == [max(tokens // unit, 1) * unit for tokens in (64, 128, 5120, 8192)]


def test_a_picture_becomes_what_the_processor_makes_of_it() -> None:
    assert picture(adapter_of("qwen2_5_vl-7b"), 896, 644) == (Grid(1, 64, 46),)
    assert len(picture(adapter_of("internvl3-8b"), 896, 1344)) == 7  # six tiles and a thumbnail
    assert len(picture(adapter_of("internvl3-8b"), 300, 500)) == 1
    (grid,) = picture(adapter_of("lfm2_vl-1.6b"), 2048, 1024)
    assert grid.num_patches <= 1024
    assert grid.h > grid.w


@pytest.mark.parametrize("name", NAMES)
def test_mixes_are_the_same_every_time_and_within_their_bounds(name: str) -> None:
    adapter = adapter_of(name)
    for mix in ("mix-v1", "mix-log"):
        shapes = workload(mix, adapter, (), None)
        assert shapes == workload(mix, adapter, (), None)
        assert max(num_tokens(adapter, shape) for shape in shapes) <= MIX_MAX_TOKENS
        assert {len(shape.items) for shape in shapes} <= {1, 2, 4, 8, 16, 32}
        assert len(shapes) > 1000
    assert workload("mix-v1", adapter, (), 3) == workload("mix-v1", adapter, (), None)[:3]


def test_videos_are_clips_of_growing_length_where_the_model_takes_them() -> None:
    clips = workload("videos", adapter_of("qwen2_5_vl-7b"), (), None)
    assert [shape.grids[0].t for shape in clips] == [2, 4, 8, 16, 32, 64]
    assert workload("videos", adapter_of("lfm2_vl-1.6b"), (), None) == []


def test_inputs_hold_the_pixels_of_the_shape_on_the_cpu_rounded_to_the_model() -> None:
    adapter = adapter_of("internvl3-1b@tiny")
    shape = sized(adapter, 16)
    inputs = processor_outputs(adapter, shape, torch.bfloat16)
    assert inputs["pixel_values"].shape[0] == len(shape.grids)
    assert torch.equal(inputs["pixel_values"], inputs["pixel_values"].bfloat16().float())
    assert inputs["num_patches"] == [len(item) for item in shape.items]
