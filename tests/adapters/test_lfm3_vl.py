"""LFM3-VL: convolutions over neighbours, attention in groups, and the user's modules."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_for
from onereplay.adapters.lfm3_vl import neighbour_rows
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.core.plan import Eager, Replay
from onereplay.encoder import Encoder
from onereplay.geometry import Grid, neighbour_steps
from onereplay.loading import random_weights_
from onereplay.preprocess import grid_of, load_image_processor, preprocess_images
from onereplay.presets import get_preset, hf_config
from tests.adapters.test_failures import agrees

pytest.importorskip("transformers.models.lfm3_vl.modeling_lfm3_vl", reason="transformers is older")

PRESET = "lfm3_vl-2b@tiny"


@pytest.fixture(scope="module")
def lfm3() -> Iterator[Encoder]:
    config = EncoderCudaGraphConfig(token_budgets=(64, 128), backend="traced", max_items_per_batch=8)
    with Encoder.from_preset(PRESET, config=config) as made:
        yield made


def close(found: Tensor, expected: Tensor) -> bool:
    """The fp32 rule of `onereplay.checking`: the same sums in another order."""
    return bool((found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1))


def test_the_published_tower_has_eight_convolutions_and_six_attentions() -> None:
    kinds = get_preset("lfm3_vl-2b").config["vision_config"]["layer_types"]
    assert (kinds.count("conv"), kinds.count("full_attention")) == (8, 6)


@pytest.mark.parametrize(
    "grids",
    [
        [Grid(1, 2, 2)],
        [Grid(1, 2, 14), Grid(1, 14, 2), Grid(1, 6, 6)],
        [Grid(1, 4, 4), Grid(3, 4, 6), Grid(4, 2, 2)],
    ],
    ids=str,
)
def test_thin_images_and_videos_are_those_of_transformers(lfm3: Encoder, grids: list[Grid]) -> None:
    assert isinstance(agrees(lfm3, grids), Replay)


def test_a_video_of_more_frames_than_slots_is_right_and_eager(lfm3: Encoder) -> None:
    assert isinstance(agrees(lfm3, [Grid(9, 2, 4)]), Eager)


def test_one_convolution_is_the_stock_one_on_every_frame(lfm3: Encoder) -> None:
    adapter = lfm3.adapter
    grids = [Grid(1, 6, 4), Grid(2, 2, 6)]
    own, stock = (model.vision_tower.layers[0].conv for model in (adapter.own, adapter.model))
    hidden = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    steps = np.concatenate([neighbour_steps(grid, 2, 3) for grid in grids])
    with torch.no_grad():
        found = own(hidden, neighbour_rows(torch.from_numpy(steps)))
        expected = stock(hidden, [[*grid] for grid in grids])
    assert close(found, expected)


def test_nan_in_one_frame_stays_in_it(lfm3: Encoder) -> None:
    """Neighbouring rows of the batch are not neighbours in a frame."""
    inputs = lfm3.adapter.example_inputs([Grid(3, 4, 4)], torch.Generator().manual_seed(0))
    before = lfm3.encode_inputs(**inputs)[0]
    inputs["pixel_values_videos"][16:32] = torch.nan
    after = lfm3.encode_inputs(**inputs)[0]
    assert torch.equal(after[:4], before[:4])
    assert torch.equal(after[8:], before[8:])
    assert after[4:8].isnan().all()


def test_the_users_convolutions_stay_the_stock_ones(lfm3: Encoder) -> None:
    model = lfm3.adapter.model
    assert all("forward" not in vars(part) for part in model.modules())
    again = adapter_for(model)
    inputs = again.example_inputs([Grid(1, 4, 4)], torch.Generator().manual_seed(0))
    assert close(lfm3.encode_inputs(**inputs)[0], plain_features(again, model, inputs))


def test_the_image_processor_gives_what_the_adapter_takes() -> None:
    processor = load_image_processor(get_preset(PRESET).processor)
    batch = preprocess_images(processor, "lfm3_vl", [Image.new("RGB", (100, 70), (10, 200, 10))])
    assert batch["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert batch["pixel_values"].shape == (24, 3 * 2 * 16 * 16)
    assert grid_of(processor, "lfm3_vl", 100, 70)["image_grid_thw"].tolist() == [[1, 4, 6]]


def test_a_checkpoint_loads_and_gives_the_stock_features(tmp_path: Path) -> None:
    whole = AutoModelForImageTextToText.from_config(hf_config(get_preset(PRESET)), dtype=torch.float32).eval()
    random_weights_(whole.model, ("vision_tower", "multi_modal_projector"))
    whole.save_pretrained(tmp_path)
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    with Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=config) as encoder:
        inputs = encoder.adapter.example_inputs([Grid(1, 4, 6), Grid(1, 8, 4)], torch.Generator().manual_seed(0))
        found = encoder.encode_inputs(**inputs)
    with torch.no_grad():
        expected = whole.model.get_image_features(**inputs).pooler_output
    assert all(close(one, other) for one, other in zip(found, expected, strict=True))
