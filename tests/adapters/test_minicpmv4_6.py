"""MiniCPM-V 4.6: slices, the order of the merges, positions, configurations that are refused.

Tolerance: float32, sums in another order; see `onereplay.checking`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6ViTWindowAttentionMerger

from onereplay import EncoderCudaGraphConfig, accelerate
from onereplay.adapters import adapter_class
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.encoder import Encoder
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.preprocess import grid_of, load_image_processor, preprocess_images
from onereplay.presets import get_preset, hf_config
from tests.adapters.test_failures import agrees, made

TINY = "minicpmv4_6@tiny"
MIXED_SIZES = "get_vision_merged_shape" not in MiniCPMV4_6ViTWindowAttentionMerger.forward.__code__.co_names
"""In transformers 5.17 the merger takes the size of the first slice for all."""
mixed_sizes = pytest.mark.skipif(not MIXED_SIZES, reason="transformers merges slices of one size only before 5.24")


@pytest.fixture(scope="module")
def minicpm() -> Iterator[Encoder]:
    with made((64, 128), "minicpmv4_6") as encoder:
        yield encoder


def inputs_of(encoder: Encoder, grids: list[Grid]) -> dict[str, Tensor]:
    return encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(0))


@mixed_sizes
def test_slices_of_several_sizes_share_a_replay(minicpm: Encoder) -> None:
    assert isinstance(agrees(minicpm, [Grid(1, 8, 12), Grid(1, 4, 4), Grid(1, 28, 4)]), Replay)


def test_slices_of_one_size_share_a_replay(minicpm: Encoder) -> None:
    assert isinstance(agrees(minicpm, [Grid(1, 8, 12)] * 3), Replay)


def test_the_order_of_the_merges_has_tokens_in_raster_order_and_their_windows_in_it(minicpm: Encoder) -> None:
    """Each token is 4x4 patches: four windows row by row, each of four patches row by row."""
    grid = Grid(1, 8, 12)
    expected = [
        ((token_row * 4 + window_row * 2 + row) * 12) + token_column * 4 + window_column * 2 + column
        for token_row in range(2)
        for token_column in range(3)
        for window_row in range(2)
        for window_column in range(2)
        for row in range(2)
        for column in range(2)
    ]
    piece = minicpm.adapter.piece(grid)  # type: ignore[attr-defined]
    assert piece["order"].tolist() == expected
    assert np.array_equal(np.sort(piece["order"]), np.arange(96))


def test_an_image_is_all_of_its_slices_and_videos_come_behind(minicpm: Encoder) -> None:
    stills = inputs_of(minicpm, [Grid(1, 8, 8)] + [Grid(1, 4, 8)] * 4)
    clip = {
        "pixel_values_videos": stills["pixel_values"],
        "target_sizes_videos": stills["target_sizes"],
        "num_patches_per_frame": [2, 1, 2],
        "num_frames_per_video": [2, 1],
    }
    found = minicpm.encode_inputs(**stills, num_patches_per_image=torch.tensor([3, 2]), grids=[[1, 2], [1, 1]], **clip)
    assert [len(rows) for rows in found] == [4 + 2 + 2, 2 + 2, 4 + 2 + 2, 2 + 2]
    apart = torch.cat(minicpm.encode_inputs(**stills))
    assert (torch.cat(found[:2]) - apart).abs().max() <= FP32_TOLERANCE * apart.abs().max()
    sizes = {name: value for name, value in clip.items() if not name.startswith("pixel")}
    items = minicpm.adapter.items_of(target_sizes=stills["target_sizes"], num_patches_per_image=[3, 2], **sizes)
    assert [item.num_tokens for item in items] == [len(rows) for rows in found]


@pytest.mark.parametrize("frames", [2, 64, 65, 130])
def test_a_video_of_any_number_of_frames_is_right(minicpm: Encoder, frames: int) -> None:
    assert isinstance(agrees(minicpm, [Grid(frames, 4, 4)]), Replay if frames <= 64 else Eager)


def test_a_slice_longer_than_the_processor_makes_is_one_eager_forward(minicpm: Encoder) -> None:
    with made((256,), "minicpmv4_6") as encoder:
        step = agrees(encoder, [Grid(1, 48, 48)])
        assert isinstance(step, Eager)
        assert step.reason is Reason.SEQUENCE_TOO_LONG


def test_inputs_that_do_not_fit_are_refused_with_the_rule(minicpm: Encoder) -> None:
    inputs = inputs_of(minicpm, [Grid(1, 8, 8), Grid(1, 4, 8)])
    pixels, sizes = inputs["pixel_values"], inputs["target_sizes"]
    for given, message in (
        ({"pixel_values": pixels}, "come together"),
        ({"pixel_values": pixels, "target_sizes": torch.tensor([[6, 8]])}, "multiples of 4 patches"),
        ({"pixel_values": pixels[..., 14:], "target_sizes": sizes}, "asks for \\(1, 3, 14, 1344\\)"),
        (inputs | {"num_patches_per_image": [3]}, "adds up to 3"),
        (inputs | {"num_patches_per_image": [2, 0]}, "positive integers"),
    ):
        with pytest.raises(InputError, match=message):
            minicpm.encode_inputs(**given)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("", "downsample_mode", "4x"),
        ("", "merger_times", 2),
        ("vision_config", "insert_layer_id", 4),
        ("vision_config", "insert_layer_id", -1),
        ("vision_config", "window_kernel_size", (4, 4)),
    ],
)
def test_a_tower_without_its_merge_or_with_another_is_refused(where: str, name: str, value: Any) -> None:
    """With `insert_layer_id` beyond the last layer transformers leaves the merge out without a word."""
    config = hf_config(get_preset(TINY))
    setattr(config.vision_config if where else config, name, value)
    with pytest.raises(UnsupportedModelError, match="as published"):
        adapter_class("minicpmv4_6")(config)


def test_a_call_for_four_times_the_tokens_goes_to_the_stock_method() -> None:
    model = AutoModelForImageTextToText.from_config(hf_config(get_preset(TINY))).float().eval()
    with accelerate(model, EncoderCudaGraphConfig(token_budgets=(64,))) as handle, torch.no_grad():
        inputs = handle.adapter.example_inputs([Grid(1, 8, 8)], torch.Generator().manual_seed(0))
        many = model.model.get_image_features(**inputs, downsample_mode="4x").pooler_output
        few = model.model.get_image_features(**inputs, downsample_mode="16x").pooler_output
        report = handle.report()
    assert [len(rows) for rows in (*many, *few)] == [16, 4]
    assert report.eager["vision"] == {"unsupported input": 1}
    assert report.replays == {"vision": {64: 1}}


def test_a_saved_checkpoint_loads_and_gives_the_stock_features(tmp_path: Path) -> None:
    whole = AutoModelForImageTextToText.from_config(hf_config(get_preset(TINY))).float().eval()
    random_weights_(whole, ("model",), seed=3)
    whole.save_pretrained(tmp_path)
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    with Encoder.from_pretrained(tmp_path, dtype=torch.float32, config=config) as encoder:
        inputs = inputs_of(encoder, [Grid(1, 8, 4)] * 2)
        found = torch.cat(encoder.encode_inputs(**inputs))
        expected = plain_features(encoder.adapter, whole.model, inputs)
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("width", "height", "slices", "patches"), [(64, 64, 1, 1024), (640, 480, 3, 3248), (3000, 2000, 9, 9184)]
)
def test_an_image_has_the_slices_and_tokens_that_the_processor_says(
    width: int, height: int, slices: int, patches: int
) -> None:
    found = get_preset("minicpmv4_6")
    processor = load_image_processor(found.processor)
    adapter = adapter_class("minicpmv4_6")(hf_config(found))
    sizes = grid_of(processor, "minicpmv4_6", width, height)
    assert sizes["num_patches_per_image"].tolist() == [slices]
    assert sizes["target_sizes"].dtype == torch.int64
    (item,) = adapter.items_of(**sizes)
    assert item.sizes["vision"].sequences == slices
    assert item.num_tokens == int(sizes["target_sizes"].prod(1).sum()) // 16
    assert item.sizes["vision"].patches == patches


def test_images_are_joined_as_the_processor_joins_them() -> None:
    processor = load_image_processor(get_preset(TINY).processor)
    images = [Image.effect_noise(size, 90).convert("RGB") for size in ((300, 200), (60, 60), (112, 112))]
    batch = preprocess_images(processor, "minicpmv4_6", images)
    expected = processor(images=images, return_tensors="pt")
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])
    assert torch.equal(batch["target_sizes"], expected["target_sizes"].long())
    assert batch["num_patches_per_image"].tolist() == expected["num_patches_per_image"]
