"""PaddleOCR-VL: where patches lie on the table of positions, images alone, raster order.

Tolerance: the fp32 rule of `onereplay.checking` where features are compared; taps are compared exactly, since both
sides do the same float32 operations in the same order.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from onereplay import Encoder, EncoderCudaGraphConfig, accelerate
from onereplay.adapters import adapter_class
from onereplay.adapters.paddleocr_vl import PaddleOCRVL, centred_taps
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Replay
from onereplay.errors import InputError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_, vision_model
from onereplay.preprocess import grid_of, load_image_processor, preprocess_images
from onereplay.presets import get_preset, hf_config
from tests.adapters.test_failures import agrees, made

PRESET = "paddleocr_vl-0.9b@tiny"
GRIDS = [Grid(1, 4, 6), Grid(1, 14, 2), Grid(1, 8, 8), Grid(1, 2, 2)]


@pytest.fixture(scope="module")
def paddle() -> Iterator[Encoder]:
    with made((64, 128), "paddleocr_vl", max_items_per_batch=8) as encoder:
        yield encoder


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1))


@given(st.integers(1, 3), st.integers(1, 60), st.integers(1, 60), st.integers(1, 30))
def test_centred_taps_are_those_of_transformers(t: int, h: int, w: int, side: int) -> None:
    expected, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([[t, h, w]]), side, mode="bilinear", align_corners=False
    )
    found = centred_taps(Grid(t, h, w), side)
    assert found[0].dtype == np.dtype(np.int32)
    assert found[1].dtype == np.dtype(np.float32)
    assert np.array_equal(found[0], expected.numpy())
    assert np.array_equal(found[1], weights.numpy())


@pytest.mark.parametrize("corners", [True, False])
def test_the_tower_says_where_patches_lie_on_the_table(corners: bool) -> None:
    """transformers 5.17 says True, 5.24 False."""
    model = vision_model(
        hf_config(get_preset(PRESET)), device="cpu", dtype=torch.float32, parts=("visual", "projector")
    )
    random_weights_(model, ("visual", "projector"))
    model.visual.vision_model.embeddings.interpolation_align_corners = corners
    adapter = PaddleOCRVL(model.config, model)
    inputs = adapter.example_inputs(GRIDS, torch.Generator().manual_seed(0))
    found = torch.cat(EncoderCudaGraphManager(adapter).encode(adapter.batch(**inputs)))
    assert close(found, plain_features(adapter, model, inputs))


def test_thin_images_are_those_of_transformers(paddle: Encoder) -> None:
    assert isinstance(agrees(paddle, GRIDS), Replay)


def test_frames_of_one_grid_are_images_of_their_own(paddle: Encoder) -> None:
    pixels = torch.randn(3 * 24, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    (clip,) = paddle.encode_inputs(pixel_values=pixels, image_grid_thw=[[3, 4, 6]])
    frames = paddle.encode_inputs(pixel_values=pixels, image_grid_thw=[[1, 4, 6]] * 3)
    assert close(clip, torch.cat(frames))


def test_videos_are_refused_by_name(paddle: Encoder) -> None:
    message = "does not take pixel_values_videos, video_grid_thw; it takes pixel_values, image_grid_thw$"
    with pytest.raises(InputError, match=message):
        paddle.encode_inputs(pixel_values_videos=torch.zeros(4, 3, 14, 14), video_grid_thw=[[1, 2, 2]])
    with pytest.raises(InputError, match=r"does not take video_grid_thw; it takes image_grid_thw$"):
        paddle.adapter.items_of(video_grid_thw=[[1, 2, 2]])


@pytest.mark.parametrize(("size", "tokens"), [((28, 28), 14 * 14), ((640, 480), 391), ((6000, 4000), 73 * 48)], ids=str)
def test_images_have_the_tokens_of_the_published_processor(size: tuple[int, int], tokens: int) -> None:
    """Sides are multiples of 28 pixels; an image has from 147,384 to 2,822,400 of them."""
    preset = get_preset(PRESET.removesuffix("@tiny"))
    found = grid_of(load_image_processor(preset.processor), preset.model_type, *size)["image_grid_thw"]
    (item,) = adapter_class(preset.model_type)(hf_config(preset)).items_of(image_grid_thw=found)
    assert item.num_tokens == tokens


def test_files_become_what_the_adapter_takes(paddle: Encoder) -> None:
    processor = load_image_processor(get_preset(PRESET).processor)
    images = [Image.new("RGB", size, "red") for size in ((252, 112), (120, 60))]
    batch = preprocess_images(processor, "paddleocr_vl", images)
    assert batch["image_grid_thw"].tolist() == [[1, 8, 18], [1, 4, 8]]
    assert [len(rows) for rows in paddle.encode_inputs(**batch)] == [36, 8]


def test_a_checkpoint_and_an_accelerated_model_give_the_stock_features(tmp_path: Path) -> None:
    whole = AutoModelForImageTextToText.from_config(hf_config(get_preset(PRESET)), dtype=torch.float32).eval()
    random_weights_(whole.model, ("visual", "projector"))
    whole.save_pretrained(tmp_path)
    inputs = PaddleOCRVL(whole.config).example_inputs(GRIDS, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = whole.get_image_features(**inputs).pooler_output
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    with Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=config) as encoder:
        found = encoder.encode_inputs(**inputs)
    assert all(close(one, other) for one, other in zip(found, expected, strict=True))
    with accelerate(whole, config) as handle, torch.no_grad():
        output = whole.get_image_features(**inputs).pooler_output
        assert handle.report().replays == {"vision": {64: 1}}
    assert type(output) is type(expected)
    assert all(close(one, other) for one, other in zip(output, expected, strict=True))
