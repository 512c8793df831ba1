"""Gemma 4: widths of padding, positions, videos, clipping and standardizing.

Tolerance: float32, sums in another order; see `onereplay.checking`. What only moves padding is compared bit for bit.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import Gemma4ForConditionalGeneration
from transformers.models.gemma4.modeling_gemma4 import Gemma4Model

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters.gemma4 import Gemma4
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.core.plan import Eager, Reason, Replay, plan
from onereplay.encoder import Encoder, planner
from onereplay.errors import InputError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.media import load_video
from onereplay.preprocess import grid_of, load_image_processor, preprocess_images, preprocess_video
from onereplay.presets import get_preset, hf_config
from tests.adapters.test_failures import agrees, made

WIDTHS = (70, 140, 280, 560, 1120)
"""Tokens that the processor pads an image to."""
FRAMES_SHARE_AN_AXIS = "num_frames_per_video" in inspect.signature(Gemma4Model.get_video_features).parameters
"""From transformers 5.24 on; before, all videos of a batch have as many frames."""


@pytest.fixture(scope="module")
def gemma() -> Iterator[Encoder]:
    with made((64, 128), "gemma4") as encoder:
        yield encoder


def images(encoder: Encoder, grids: list[Grid], tokens: int, padding: float = 0.0) -> dict[str, Tensor]:
    """As the processor gives them: rows of `tokens * 9` patches, the rest `padding` at (-1, -1)."""
    inputs = encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(0))
    pixels, places = inputs["pixel_values"], inputs["image_position_ids"]
    wide = torch.full((len(grids), tokens * 9, pixels.shape[2]), padding)
    positions = torch.full((len(grids), tokens * 9, 2), -1)
    for row, grid in enumerate(grids):
        wide[row, : grid.num_patches] = pixels[row, : grid.num_patches]
        positions[row, : grid.num_patches] = places[row, : grid.num_patches]
    counts = torch.tensor([grid.num_patches // 9 for grid in grids])
    return {"pixel_values": wide, "image_position_ids": positions, "num_soft_tokens_per_image": counts}


def test_one_set_of_graphs_serves_every_width_with_the_same_bits(gemma: Encoder) -> None:
    grids = [Grid(1, 12, 15), Grid(1, 3, 30), Grid(1, 9, 3)]
    before = gemma.report().replays.get("vision", {}).get(64, 0)
    found = [torch.cat(gemma.encode_inputs(**images(gemma, grids, tokens))) for tokens in WIDTHS]
    assert all(torch.equal(found[0], other) for other in found)
    assert gemma.report().replays["vision"] == {64: before + len(WIDTHS)}
    inputs = {name: value for name, value in images(gemma, grids, 70).items() if not name.startswith("num_")}
    expected = plain_features(gemma.adapter, gemma.adapter.model, inputs)
    assert (found[0] - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max()


def test_nan_in_the_padding_of_a_row_is_not_read(gemma: Encoder) -> None:
    """In transformers it would reach every image of the batch."""
    grids = [Grid(1, 6, 6), Grid(1, 9, 12)]
    clean, dirty = (gemma.encode_inputs(**images(gemma, grids, 70, value)) for value in (0.0, torch.nan))
    assert all(torch.equal(rows, other) for rows, other in zip(clean, dirty, strict=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, Eager), ({"max_token_budget": 8960}, Replay), ({"max_token_budget": None}, Replay)],
)
def test_32_images_of_280_tokens_are_one_eager_forward_or_one_replay(options: dict[str, Any], expected: type) -> None:
    preprocessor, capacities = planner("preset:gemma4-e4b", EncoderCudaGraphConfig(**options))
    items = preprocessor.adapter.items_of(num_soft_tokens_per_image=torch.tensor([280] * 32))
    (step,) = plan(items, capacities).steps.values()
    assert isinstance(step, expected)
    if isinstance(step, Eager):
        assert step.reason is Reason.OVER_LARGEST_BUDGET
    elif options["max_token_budget"]:
        assert step.capacity.tokens == 8960
        assert step.capacity.patches == 80_640
        assert step.capacity.longest == 10_080


@pytest.mark.parametrize(("budgets", "expected"), [((64,), Eager), ((64, 128), Replay)])
def test_32_images_that_exceed_the_cap_by_half_are_right_either_way(budgets: tuple[int, ...], expected: type) -> None:
    with made(budgets, "gemma4") as encoder:
        assert isinstance(agrees(encoder, [Grid(1, 6, 6)] * 32), expected)


@pytest.mark.parametrize("frames", [2, 64, 65, 130])
def test_a_video_of_any_number_of_frames_is_right(gemma: Encoder, frames: int) -> None:
    step = agrees(gemma, [Grid(frames, 3, 3)])
    assert isinstance(step, Replay if frames <= 64 else Eager)


@pytest.mark.skipif(not FRAMES_SHARE_AN_AXIS, reason="transformers takes videos of one length before 5.24")
def test_videos_of_several_lengths_are_items_behind_the_images(gemma: Encoder) -> None:
    grids = [Grid(3, 6, 3), Grid(1, 3, 3), Grid(2, 3, 6)]
    assert isinstance(agrees(gemma, grids), Replay)
    inputs = gemma.adapter.example_inputs(grids, torch.Generator().manual_seed(0))
    assert [len(rows) for rows in gemma.encode_inputs(**inputs)] == [1, 6, 4]


def test_videos_with_an_axis_of_their_own_are_the_same_batch(gemma: Encoder) -> None:
    inputs = gemma.adapter.example_inputs([Grid(3, 6, 3)] * 2, torch.Generator().manual_seed(0))
    flat = {name: value.reshape(6, *value.shape[-2:]) for name, value in inputs.items() if value.ndim > 1}
    counted = gemma.encode_inputs(**flat, num_frames_per_video=[3, 3])
    stacked = gemma.encode_inputs(**{name: value.unflatten(0, (2, 3)) for name, value in flat.items()})
    assert [len(rows) for rows in counted] == [6, 6]
    assert all(torch.equal(rows, other) for rows, other in zip(counted, stacked, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda places: places[:, ::2], "not the raster of"),
        (lambda places: places.flip(2), "not the raster of"),
        (lambda places: places.roll(1, 1), "not the raster of"),
        (lambda places: places[:, :6], "has 1x6 patches; height and width must be multiples of 3"),
        (lambda places: torch.full_like(places, -1), "has 0x0 patches"),
        (lambda places: places * 10_000, "multiples of 3 patches from 3 to 10240"),
        (lambda places: places[0, 0], "must be a table of integers"),
    ],
)
def test_other_positions_than_a_raster_are_refused_with_the_rule(gemma: Encoder, change: Any, message: str) -> None:
    inputs = images(gemma, [Grid(1, 6, 9)], 6)
    with pytest.raises(InputError, match=message):
        gemma.encode_inputs(
            pixel_values=inputs["pixel_values"], image_position_ids=change(inputs["image_position_ids"])
        )


def test_inputs_that_do_not_fit_together_are_refused(gemma: Encoder) -> None:
    inputs = images(gemma, [Grid(1, 6, 9)], 70)
    pixels, places = inputs["pixel_values"], inputs["image_position_ids"]
    for given, message in (
        ({"pixel_values": pixels}, "come together"),
        ({"pixel_values": pixels[:, :9], "image_position_ids": places}, "asks for"),
        (inputs | {"num_soft_tokens_per_image": torch.tensor([7])}, "does not fit image_position_ids"),
        ({"pixel_values_videos": pixels, "video_position_ids": places}, "give num_frames_per_video"),
        (
            {"pixel_values_videos": pixels, "video_position_ids": places, "num_frames_per_video": [2]},
            "adds up to 2 frames",
        ),
    ):
        with pytest.raises(InputError, match=message):
            gemma.encode_inputs(**given)


@pytest.mark.parametrize(("preset", "buffer"), [("gemma4-e2b", "output_max"), ("gemma4-31b", "std_bias")])
def test_buffers_of_the_checkpoint_change_the_features_as_in_transformers(preset: str, buffer: str) -> None:
    """Small towers clip their linear layers, large ones standardize: a forward without either would pass on infinite
    bounds and on zero and one."""
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    with Encoder.from_preset(f"{preset}@tiny", config=config) as encoder:
        tower = encoder.adapter.model.vision_tower
        values = dict(tower.named_buffers())
        name = next(name for name in values if name.endswith(buffer))
        assert values[name].isfinite().all()
        grids = [Grid(1, 6, 9)]
        assert isinstance(agrees(encoder, grids), Replay)
        before = torch.cat(encoder.encode_inputs(**images(encoder, grids, 70)))
        values[name].sub_(2.5)
        assert isinstance(agrees(encoder, grids), Replay)
        assert not torch.allclose(before, torch.cat(encoder.encode_inputs(**images(encoder, grids, 70))), rtol=0.01)


@pytest.mark.parametrize("preset", ["gemma4-e2b@tiny", "gemma4-26b-a4b@tiny"])
def test_a_saved_checkpoint_loads_with_its_buffers_and_gives_the_stock_features(preset: str, tmp_path: Path) -> None:
    whole = Gemma4ForConditionalGeneration(hf_config(get_preset(preset))).eval()
    random_weights_(whole, ("model",), seed=3)
    whole.save_pretrained(tmp_path)
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    with Encoder.from_pretrained(tmp_path, dtype=torch.float32, config=config) as encoder:
        inputs = images(encoder, [Grid(1, 9, 6), Grid(1, 3, 3)], 70)
        found = torch.cat(encoder.encode_inputs(**inputs))
        expected = plain_features(encoder.adapter, whole.model, inputs)
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("width", "height", "tokens"), [(28, 28, 256), (640, 480, 266), (3000, 2000, 260), (200, 900, 245), (60, 2000, 192)]
)
def test_an_image_has_as_many_tokens_as_the_processor_says(width: int, height: int, tokens: int) -> None:
    processor = load_image_processor(get_preset("gemma4-e2b").processor)
    adapter = Gemma4(hf_config(get_preset("gemma4-e2b")))
    sizes = grid_of(processor, "gemma4", width, height)
    assert [item.num_tokens for item in adapter.items_of(**sizes)] == [tokens]
    batch = preprocess_images(processor, "gemma4", [Image.new("RGB", (width, height))])
    assert [item.num_tokens for item in adapter.batch(**batch).items] == [tokens]


def test_a_frame_of_a_video_has_at_most_70_tokens() -> None:
    processor = load_image_processor(get_preset("gemma4-e2b").processor)
    adapter = Gemma4(hf_config(get_preset("gemma4-e2b")))
    batch = preprocess_video(processor, "gemma4", load_video([Image.new("RGB", (640, 480), "red")] * 3))
    sizes = grid_of(processor, "gemma4", 640, 480, num_frames=3)
    assert all(torch.equal(batch[name], sizes[name]) for name in sizes)
    (item,) = adapter.batch(**batch).items
    assert (item,) == adapter.items_of(**sizes)
    assert item.sizes["vision"].sequences == 3
    assert item.num_tokens == 3 * int(batch["num_soft_tokens_per_video"]) <= 3 * 70
