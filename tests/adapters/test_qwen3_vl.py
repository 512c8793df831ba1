"""Qwen3-VL and Qwen3.5: deepstack levels, the resampled table of positions, videos by their volume."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters.interpolation import sum_taps
from onereplay.adapters.qwen3_vl import Qwen3VL
from onereplay.checking import FP32_TOLERANCE
from onereplay.encoder import Encoder
from onereplay.geometry import Grid, bilinear_taps
from onereplay.media import Video, load_video
from onereplay.preprocess import PixelLimits, grid_of, load_image_processor, preprocess_images, preprocess_video
from onereplay.presets import get_preset
from tests.adapters.conftest import tiny_preset

GRIDS = [Grid(1, 6, 4), Grid(1, 2, 8), Grid(1, 10, 10)]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_vl_moe"])
def deep(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    with Encoder.from_preset(tiny_preset(request.param), config=config) as made:
        yield made


# -------- deepstack


def stock_and_found(encoder: Encoder) -> tuple[Any, list[Tensor]]:
    inputs = encoder.adapter.example_inputs(GRIDS, torch.Generator().manual_seed(0))
    with torch.no_grad():
        stock = encoder.adapter.model.get_image_features(**inputs)
    return stock, encoder.encode_inputs(**inputs)


def parts_of(output: Any, like: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Output and levels, each split by item; transformers 5.17 leaves the levels whole."""
    counts = [len(rows) for rows in like]
    whole = [part if isinstance(part, Tensor) else torch.cat(part) for part in output.deepstack_features]
    return [output.pooler_output, *(part.split(counts) for part in whole)]


def test_a_row_is_the_output_and_then_each_level(deep: Encoder) -> None:
    """Each part against its own largest value: none hides behind another that is larger."""
    stock, found = stock_and_found(deep)
    assert len(stock.deepstack_features) == 3
    for place, part in enumerate(parts_of(stock, found)):
        for rows, expected in zip(found, part, strict=True):
            columns = rows[:, place * 32 : (place + 1) * 32]
            assert (columns - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)
    assert found[0].shape == (6, 4 * 32)


def test_the_stock_output_has_its_classes_and_containers_again(deep: Encoder) -> None:
    stock, found = stock_and_found(deep)
    again = deep.adapter.stock_output(found)
    assert type(again) is type(stock)
    assert type(again.pooler_output) is type(stock.pooler_output)
    assert [type(level) for level in again.deepstack_features] == [type(level) for level in stock.deepstack_features]
    assert type(again.deepstack_features) is type(stock.deepstack_features)
    for ours, theirs in zip(parts_of(again, found), parts_of(stock, found), strict=True):
        assert [rows.shape for rows in ours] == [rows.shape for rows in theirs]
        assert all(rows.is_contiguous() for rows in ours)
    assert all(torch.equal(*pair) for pair in zip(deep.adapter.stock_rows(again), found, strict=True))


# -------- positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_taps_is_that_of_transformers(dtype: torch.dtype) -> None:
    """Four products of order one in float32, in another order or fused: 4 x 6e-8. In bfloat16 the sum is rounded once,
    so a difference in the last bit of float32 may be one step, 2^-8 of the value."""
    table = torch.randn(49, 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    indices, weights = (torch.from_numpy(array) for array in bilinear_taps(Grid(1, 30, 22), 7, 2))
    expected = (table[indices] * weights[:, :, None]).sum(1)
    found = sum_taps(table, indices, weights)
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8 * expected.abs().max()
    assert (found - expected).abs().max() <= tolerance
    same = (found == expected.to(dtype)).double().mean()
    assert dtype == torch.float32 or same > 0.99


class Shapes(TorchDispatchMode):
    """The shapes of all results of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_there_is_never_a_row_of_the_table_for_each_tap(model_type: str) -> None:
    """As there is in transformers: `(patches, 4, width)` in float32. 72 tokens are over the budget: eager."""
    with Encoder.from_preset(tiny_preset(model_type), config=EncoderCudaGraphConfig(token_budgets=(64,))) as encoder:
        inputs = encoder.adapter.example_inputs([Grid(1, 16, 18)], torch.Generator().manual_seed(0))
        with torch.no_grad(), Shapes() as stock:
            encoder.adapter.model.get_image_features(**inputs)
        with Shapes() as ours:
            encoder.encode_inputs(**inputs)
    assert (16 * 18, 4, 72) in stock.seen
    assert (16 * 18, 72) in ours.seen
    assert (16 * 18, 4, 72) not in ours.seen


def test_padding_rows_of_the_metadata_do_not_reach_real_ones(deep: Encoder) -> None:
    """The smallest image after the largest: what the tail held is zero taps of row zero."""
    large = deep.adapter.example_inputs([Grid(1, 16, 16)], torch.Generator().manual_seed(0))
    small = deep.adapter.example_inputs([Grid(1, 2, 2)], torch.Generator().manual_seed(1))
    (first,) = deep.encode_inputs(**small)
    deep.encode_inputs(**{**large, "pixel_values": torch.full_like(large["pixel_values"], torch.nan)})
    (again,) = deep.encode_inputs(**small)
    assert torch.equal(first, again)


# -------- files


def video(num_frames: int, width: int, height: int) -> Video:
    generator = np.random.default_rng(0)
    return load_video(
        [Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)) for _ in range(num_frames)]
    )


@pytest.fixture(scope="module")
def processor() -> Any:
    return load_image_processor(get_preset("qwen3_vl-8b").processor)


@pytest.mark.parametrize(
    ("width", "height", "tokens"), [(1, 1, 64), (256, 256, 64), (1024, 768, 768), (640, 427, 260), (9999, 9999, 16384)]
)
def test_an_image_is_a_token_for_each_32_pixels_squared(processor: Any, width: int, height: int, tokens: int) -> None:
    """At least 256x256 pixels and at most 4096x4096, as published."""
    (t, h, w) = grid_of(processor, "qwen3_vl", width, height)["image_grid_thw"][0].tolist()
    assert t * h * w // 4 == tokens


def published_grid(num_frames: int, height: int, width: int) -> tuple[int, int, int]:
    """Sides in units of 32 pixels, scaled by one factor where the volume of the video is over its limit."""
    frames = max(num_frames, 2)
    sides = [round(height / 32), round(width / 32)]
    if round(frames / 2) * 2 * sides[0] * sides[1] * 1024 > 25165824:
        scale = (25165824 / (frames * height * width)) ** 0.5
        sides = [max(1, int(height * scale / 32)), max(1, int(width * scale / 32))]
    return -(-num_frames // 2), 2 * sides[0], 2 * sides[1]


@pytest.mark.parametrize("num_frames", [1, 2, 5, 16, 64, 768])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5_moe"])
def test_more_frames_are_smaller_frames(processor: Any, model_type: str, num_frames: int) -> None:
    grid = grid_of(processor, model_type, 1280, 720, num_frames=num_frames)["video_grid_thw"][0].tolist()
    assert tuple(grid) == published_grid(num_frames, 720, 1280)
    assert grid[0] * grid[1] * grid[2] // 4 <= 25165824 // 2 // 1024 + grid[1] * grid[2] // 4


@pytest.mark.parametrize("num_frames", [1, 2, 5])
def test_a_patch_takes_its_slices_from_consecutive_frames(processor: Any, num_frames: int) -> None:
    clip, limits = video(num_frames, 130, 100), PixelLimits(4 * 1024, 5 * 8 * 1024)
    batch = preprocess_video(processor, "qwen3_vl", clip, pixel_limits=limits)
    grid = grid_of(processor, "qwen3_vl", 130, 100, num_frames=num_frames, pixel_limits=limits)["video_grid_thw"]
    assert torch.equal(grid, batch["video_grid_thw"])
    groups, height, width = grid[0].tolist()
    rows = batch["pixel_values_videos"].view(groups, height * width, 3, 2, 16, 16)
    for slot in range(2 * groups):
        frame = clip.frames[min(slot, num_frames - 1)].resize((16 * width, 16 * height), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1) / 127.5 - 1
        units = pixels.view(3, height // 2, 2, 16, width // 2, 2, 16).permute(1, 4, 2, 5, 0, 3, 6)
        # Scaling and normalising in one step or in two: a rounding of values of order one.
        assert (rows[slot // 2, :, :, slot % 2] - units.flatten(0, 3)).abs().max() < 1e-6


def test_two_equal_frames_within_the_limits_are_the_rows_of_the_image(processor: Any) -> None:
    frame = video(1, 512, 320).frames[0]
    batch = preprocess_video(processor, "qwen3_5", load_video([frame, frame]))
    expected = preprocess_images(processor, "qwen3_5", [frame])
    assert torch.equal(batch["video_grid_thw"], expected["image_grid_thw"])
    assert torch.equal(batch["pixel_values_videos"], expected["pixel_values"])


def test_files_of_a_tiny_preset_encode_images_and_videos(tmp_path: Any) -> None:
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    clip = video(3, 96, 64)
    with Encoder.from_preset(tiny_preset("qwen3_vl"), config=config) as encoder:
        assert isinstance(encoder.adapter, Qwen3VL)
        features = encoder.encode([clip.frames[0], clip])
    assert [rows.shape for rows in features] == [(70, 128), (2 * 2 * 3, 128)]
