"""ERNIE-4.5-VL: pairs of frames, odd numbers of them, and budgets by patches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_class
from onereplay.checking import FP32_TOLERANCE
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.encoder import Encoder
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.preprocess import grid_of, load_image_processor, preprocess_images
from onereplay.presets import get_preset, hf_config
from tests.adapters.test_failures import agrees

PRESET = "ernie4_5_vl-28b-a3b@tiny"


@pytest.fixture(scope="module")
def ernie() -> Iterator[Encoder]:
    config = EncoderCudaGraphConfig(token_budgets=(32, 64, 128), backend="traced", max_items_per_batch=16)
    with Encoder.from_preset(PRESET, config=config) as made:
        yield made


def close(found: Tensor, expected: Tensor) -> bool:
    """The fp32 rule of `onereplay.checking`: the same sums in another order."""
    return bool((found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1))


def by_hand(model: Any, pixels: Tensor, grid: Grid) -> Tensor:
    """One item alone: the stock tower, then the resampler on frames taken two by two in a loop."""
    patches = model.vision_tower(pixels, torch.tensor([grid])).last_hidden_state
    frames = list(patches.view(grid.t, grid.h * grid.w // 4, -1))
    pairs = [(frames[0], frames[0])] if grid.t == 1 else list(zip(frames[0::2], frames[1::2], strict=True))
    resampler = model.resampler_model
    rows = []
    for first, second in pairs:
        both = torch.cat([resampler.spatial_linear(first), resampler.spatial_linear(second)], dim=-1)
        rows.append(resampler.after_norm(resampler.mlp(resampler.temporal_linear(both))))
    return torch.cat(rows)


def test_images_and_videos_of_one_batch_are_those_of_a_loop_over_items(ernie: Encoder) -> None:
    grids = [Grid(1, 4, 6), Grid(1, 2, 2), Grid(2, 4, 4), Grid(6, 2, 6)]
    inputs = ernie.adapter.example_inputs(grids, torch.Generator().manual_seed(0))
    found = ernie.encode_inputs(**inputs)
    rows = iter(torch.cat([inputs["pixel_values"], inputs["pixel_values_videos"]]).split([24, 4, 32, 72]))
    with torch.no_grad():
        expected = [by_hand(ernie.adapter.model, next(rows), grid) for grid in grids]
    assert [len(one) for one in found] == [6, 1, 4, 9]
    assert all(close(one, other) for one, other in zip(found, expected, strict=True))


def test_a_video_has_half_the_tokens_and_the_budget_of_its_patches(ernie: Encoder) -> None:
    step = agrees(ernie, [Grid(4, 8, 8)])
    assert isinstance(step, Replay)
    assert ernie.adapter.items_of(video_grid_thw=[[4, 8, 8]])[0].num_tokens == 32
    assert (step.capacity.tokens, step.capacity.patches) == (64, 256)


def test_a_video_whose_patches_fit_no_budget_is_one_eager_forward(ernie: Encoder) -> None:
    step = agrees(ernie, [Grid(10, 8, 8)])
    assert ernie.adapter.items_of(video_grid_thw=[[10, 8, 8]])[0].num_tokens == 80
    assert isinstance(step, Eager)
    assert step.reason is Reason.OVER_LARGEST_BUDGET


def test_a_video_of_more_frames_than_slots_is_right_and_eager(ernie: Encoder) -> None:
    step = agrees(ernie, [Grid(18, 2, 2)])
    assert isinstance(step, Eager)
    assert step.reason is Reason.TOO_MANY_SEQUENCES


@pytest.mark.parametrize("frames", [1, 3, 7])
def test_an_odd_number_of_frames_is_refused_with_the_processors_way_out(ernie: Encoder, frames: int) -> None:
    inputs = {"pixel_values_videos": torch.zeros(frames * 16, 588), "video_grid_thw": torch.tensor([[frames, 4, 4]])}
    with pytest.raises(InputError, match=rf"a video of grid \({frames}, 4, 4\).*repeat the last frame"):
        ernie.encode_inputs(**inputs)
    with pytest.raises(InputError, match="repeat the last frame"):
        ernie.adapter.items_of(video_grid_thw=inputs["video_grid_thw"])


def test_an_image_of_two_frames_is_refused_as_a_video_under_the_wrong_name(ernie: Encoder) -> None:
    with pytest.raises(InputError, match=r"an image of grid \(2, 4, 4\).*pixel_values_videos"):
        ernie.encode_inputs(pixel_values=torch.zeros(32, 588), image_grid_thw=torch.tensor([[2, 4, 4]]))


def test_another_number_of_frames_a_token_is_refused_before_weights_are_made() -> None:
    config = hf_config(get_preset(PRESET))
    config.vision_config.temporal_merge_size = 3
    with pytest.raises(UnsupportedModelError, match="temporal_merge_size=3"):
        adapter_class("ernie4_5_vl_moe")(config)


def test_nan_in_one_image_stays_in_it(ernie: Encoder) -> None:
    inputs = ernie.adapter.example_inputs([Grid(1, 4, 4), Grid(1, 4, 4)], torch.Generator().manual_seed(0))
    before = ernie.encode_inputs(**inputs)[0]
    inputs["pixel_values"][16:] = torch.nan
    first, second = ernie.encode_inputs(**inputs)
    assert torch.equal(first, before)
    assert second.isnan().all()


def test_the_image_processor_gives_what_the_adapter_takes() -> None:
    processor = load_image_processor(get_preset(PRESET).processor)
    image = Image.new("RGB", (90, 60), (200, 10, 10))
    batch = preprocess_images(processor, "ernie4_5_vl_moe", [image, image])
    assert batch["pixel_values"].shape == (2 * 4 * 6, 588)
    assert batch["image_grid_thw"].tolist() == [[1, 4, 6]] * 2
    assert grid_of(processor, "ernie4_5_vl_moe", 90, 60)["image_grid_thw"].tolist() == [[1, 4, 6]]


def test_a_checkpoint_loads_and_gives_the_stock_features(tmp_path: Path) -> None:
    whole = AutoModelForImageTextToText.from_config(hf_config(get_preset(PRESET)), dtype=torch.float32).eval()
    random_weights_(whole.model, ("vision_tower", "resampler_model"))
    whole.save_pretrained(tmp_path)
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    with Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=config) as encoder:
        inputs = encoder.adapter.example_inputs([Grid(1, 4, 6), Grid(1, 8, 4)], torch.Generator().manual_seed(0))
        found = encoder.encode_inputs(**inputs)
    with torch.no_grad():
        expected = whole.model.get_image_features(**inputs).pooler_output
    assert all(close(one, other) for one, other in zip(found, expected, strict=True))
