"""Preprocessing: sizes, layouts and refusals, against the processors of transformers, those that can be imported."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from onereplay.errors import CheckpointError, ConfigError, InputError, MissingDependencyError, UnsupportedModelError
from onereplay.media import Video, load_video
from onereplay.preprocess import PixelLimits, grid_of, load_image_processor, preprocess_images, preprocess_video

QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 4 * 28 * 28, "max_pixels": 256 * 28 * 28}
INTERN = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 56, "width": 56}}
LFM2 = {"image_processor_type": "Lfm2VlImageProcessorFast"}

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
needs_torchvision = pytest.mark.skipif(not HAS_TORCHVISION, reason="this processor exists only for torchvision")
MODELS = [
    pytest.param("qwen2_5_vl", QWEN, id="qwen2_5_vl"),
    pytest.param("internvl", INTERN, id="internvl"),
    pytest.param("lfm2_vl", LFM2, id="lfm2_vl", marks=needs_torchvision),
]
SIZES = [(1, 1), (27, 27), (28, 56), (300, 451), (640, 427), (14, 1400), (1400, 14), (724, 725), (1100, 900)]


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def video(num_frames: int, width: int = 70, height: int = 50) -> Video:
    return load_video([image(width, height, seed) for seed in range(num_frames)])


LIMITS = PixelLimits(4 * 28 * 28, 16 * 28 * 28)


# --- Processors


def test_a_mapping_and_a_directory_give_the_same_processor(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN))
    given_mapping, given_directory = load_image_processor(QWEN), load_image_processor(tmp_path)
    assert type(given_mapping) is type(given_directory)
    assert given_mapping.to_dict() == given_directory.to_dict()
    assert given_mapping.size["longest_edge"] == 256 * 28 * 28


@pytest.mark.parametrize("suffix", ["", "Fast", "Pil"])
def test_old_and_new_names_of_a_processor_are_the_same_class(suffix: str) -> None:
    found = load_image_processor({"image_processor_type": f"Qwen2VLImageProcessor{suffix}"})
    assert type(found) is type(load_image_processor(QWEN))


@pytest.mark.skipif(HAS_TORCHVISION, reason="torchvision is there")
def test_a_processor_for_torchvision_only_names_the_install_line(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(LFM2))
    for source in (LFM2, tmp_path):
        with pytest.raises(
            MissingDependencyError, match=r'Lfm2VlImageProcessor .* pip install "onereplay\[torchvision\]"'
        ):
            load_image_processor(source)


@pytest.mark.parametrize("name", ["NopeImageProcessor", "pipeline", "os.system", 3, None])
def test_an_unknown_processor_is_a_config_error_and_not_a_missing_package(name: Any) -> None:
    with pytest.raises(ConfigError, match="image processor"):
        load_image_processor({"image_processor_type": name})


def test_a_mapping_without_a_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="image_processor_type is missing"):
        load_image_processor({"size": 3})


def test_a_directory_without_a_processor_is_named(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "absent", str(tmp_path / "absent"), "./absent"):
        with pytest.raises(CheckpointError, match=Path(source).name):
            load_image_processor(source)


def test_a_damaged_configuration_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no image processor"):
        load_image_processor(tmp_path)


# --- Images


@pytest.mark.parametrize(("model_type", "config"), MODELS)
def test_a_batch_is_its_images_joined_in_order(model_type: str, config: dict[str, Any]) -> None:
    processor = load_image_processor(config)
    images = [image(120, 60, 1), image(60, 120, 2), image(60, 60, 3)]
    batch = preprocess_images(processor, model_type, images)
    alone = [preprocess_images(processor, model_type, [each]) for each in images]
    for name, tensor in batch.items():
        assert torch.equal(tensor, torch.cat([each[name] for each in alone])), name
    assert batch["pixel_values"].dtype == torch.float32


@pytest.mark.parametrize(("model_type", "config"), MODELS)
def test_the_result_is_what_the_processor_gives_for_the_whole_batch(model_type: str, config: dict[str, Any]) -> None:
    processor = load_image_processor(config)
    images = [image(120, 60, 1), image(60, 120, 2)]
    options = {"crop_to_patches": True} if model_type == "internvl" else {}
    expected = processor(images=images, return_tensors="pt", **options)
    batch = preprocess_images(processor, model_type, images)
    for name in expected:
        assert torch.equal(batch[name], expected[name]), name


def test_qwen_rows_and_grid_agree() -> None:
    batch = preprocess_images(load_image_processor(QWEN), "qwen2_5_vl", [image(120, 60), image(60, 60)])
    assert batch["pixel_values"].shape == (int(batch["image_grid_thw"].prod(1).sum()), 1176)
    assert batch["image_grid_thw"].shape == (2, 3)


def test_internvl_cuts_images_into_tiles_and_a_thumbnail() -> None:
    batch = preprocess_images(
        load_image_processor(INTERN), "internvl", [image(56, 56), image(112, 56), image(168, 112)]
    )
    assert batch["num_patches"].tolist() == [1, 3, 7]
    assert batch["pixel_values"].shape == (11, 3, 56, 56)


@needs_torchvision
def test_lfm2_splits_a_large_image_and_pads_every_tile() -> None:
    batch = preprocess_images(load_image_processor(LFM2), "lfm2_vl", [image(200, 100), image(1500, 900)])
    assert batch["num_tiles"].tolist() == [1, 7]
    assert batch["pixel_values"].shape == (8, 1024, 768)
    assert batch["pixel_attention_mask"].sum(1).tolist() == batch["spatial_shapes"].prod(1).tolist()


@needs_torchvision
def test_lfm2_refuses_an_image_whose_tile_would_not_fit() -> None:
    with pytest.raises(InputError, match="image 1: too elongated"):
        preprocess_images(load_image_processor(LFM2), "lfm2_vl", [image(64, 64), image(9000, 1)])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_other_modes_are_converted(mode: str) -> None:
    processor = load_image_processor(QWEN)
    batch = preprocess_images(processor, "qwen2_5_vl", [image(60, 60).convert(mode)])
    assert batch["pixel_values"].shape[1] == 1176


def test_a_refused_image_is_named_by_its_index() -> None:
    processor = load_image_processor(QWEN)
    with pytest.raises(InputError, match="image 1: absolute aspect ratio"):
        preprocess_images(processor, "qwen2_5_vl", [image(60, 60), image(4, 1000)])
    with pytest.raises(InputError, match=r"image 2: .* no pixels"):
        preprocess_images(processor, "qwen2_5_vl", [image(60, 60), image(60, 60), Image.new("RGB", (0, 4))])


def test_a_string_is_not_fetched_by_the_processor() -> None:
    with pytest.raises(InputError, match="image 0: it is a str, not a decoded image"):
        preprocess_images(load_image_processor(QWEN), "qwen2_5_vl", ["https://example.org/a.png"])  # type: ignore[list-item]


def test_no_images_and_unknown_model_types_are_refused() -> None:
    processor = load_image_processor(QWEN)
    with pytest.raises(InputError, match="at least one"):
        preprocess_images(processor, "qwen2_5_vl", [])
    with pytest.raises(UnsupportedModelError, match=r"'no_such_model'; there is .*internvl"):
        preprocess_images(processor, "no_such_model", [image(60, 60)])
    with pytest.raises(UnsupportedModelError, match="no_such_model"):
        preprocess_video(processor, "no_such_model", video(1))


# --- Videos


@pytest.mark.parametrize("num_frames", [1, 2, 5])
def test_a_qwen_patch_takes_its_slices_from_consecutive_frames(num_frames: int) -> None:
    processor, clip = load_image_processor(QWEN), video(num_frames)
    batch = preprocess_video(processor, "qwen2_5_vl", clip, pixel_limits=LIMITS)
    groups, height, width = batch["video_grid_thw"][0].tolist()
    assert groups == (num_frames + 1) // 2
    rows = batch["pixel_values_videos"].view(groups, height * width, 3, 2, 14, 14)
    size = {"shortest_edge": LIMITS.min_pixels, "longest_edge": LIMITS.max_pixels}
    for slot in range(2 * groups):
        frame = clip.frames[min(slot, num_frames - 1)]  # An odd count repeats the last frame.
        alone = processor(images=[frame], size=size, return_tensors="pt")["pixel_values"]
        assert torch.equal(rows[slot // 2, :, :, slot % 2], alone.view(-1, 3, 2, 14, 14)[:, :, 0])


def test_two_equal_frames_are_the_rows_of_the_image() -> None:
    processor, frame = load_image_processor(QWEN), image(140, 84)
    limits = PixelLimits(processor.size["shortest_edge"], processor.size["longest_edge"])
    batch = preprocess_video(processor, "qwen2_5_vl", load_video([frame, frame]), pixel_limits=limits)
    expected = preprocess_images(processor, "qwen2_5_vl", [frame])
    assert torch.equal(batch["pixel_values_videos"], expected["pixel_values"])
    assert torch.equal(batch["video_grid_thw"], expected["image_grid_thw"])


@needs_torchvision
@pytest.mark.parametrize("num_frames", [1, 4, 5])
def test_videos_equal_those_of_the_video_processors(num_frames: int) -> None:
    from transformers import InternVLVideoProcessor, Qwen2VLVideoProcessor

    clip = video(num_frames, 320, 200)
    frames = torch.stack([torch.from_numpy(np.array(frame)).permute(2, 0, 1) for frame in clip.frames])
    expected = Qwen2VLVideoProcessor(cap_pixels_per_frame=False)(videos=[frames], return_tensors="pt")
    batch = preprocess_video(load_image_processor(QWEN), "qwen2_5_vl", clip)
    assert torch.equal(batch["video_grid_thw"], expected["video_grid_thw"])
    assert torch.equal(batch["pixel_values_videos"], expected["pixel_values_videos"])
    expected = InternVLVideoProcessor(size=INTERN["size"])(videos=[frames], return_tensors="pt")
    batch = preprocess_video(load_image_processor(INTERN), "internvl", clip)
    assert torch.equal(batch["pixel_values"], expected["pixel_values_videos"][0])


def test_the_default_limits_of_a_video_are_those_of_the_video_processor() -> None:
    """128 and 768 merged patches: the class values of `Qwen2VLVideoProcessor`, which is not importable everywhere."""
    processor = load_image_processor(QWEN)
    small = grid_of(processor, "qwen2_5_vl", 28, 28, num_frames=2)["video_grid_thw"][0]
    large = grid_of(processor, "qwen2_5_vl", 4000, 4000, num_frames=2)["video_grid_thw"][0]
    assert small.tolist() == [1, 24, 24]  # 12x12 merged patches: the first square of at least 128.
    assert large.tolist() == [1, 54, 54]  # 27x27 merged patches: the last square of at most 768.


def test_a_frame_of_an_internvl_video_is_one_tile() -> None:
    batch = preprocess_video(load_image_processor(INTERN), "internvl", video(3, 168, 112))
    assert batch["pixel_values"].shape == (3, 3, 56, 56)
    assert batch["num_frames"].tolist() == [3]


def test_lfm2_says_that_it_takes_images_only() -> None:
    with pytest.raises(InputError, match="lfm2_vl takes images only"):
        preprocess_video(None, "lfm2_vl", video(1))
    with pytest.raises(InputError, match="lfm2_vl takes images only"):
        grid_of(None, "lfm2_vl", 64, 64, num_frames=2)


@pytest.mark.parametrize("limits", [(0, 10), (20, 10)])
def test_impossible_pixel_limits_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="min_pixels <= max_pixels"):
        PixelLimits(*limits)


# --- Sizes without pixels


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("model_type", "config"), MODELS)
def test_grid_of_an_image_is_what_preprocessing_gives(
    model_type: str, config: dict[str, Any], size: tuple[int, int]
) -> None:
    processor = load_image_processor(config)
    grid = grid_of(processor, model_type, *size)
    batch = preprocess_images(processor, model_type, [image(*size)])
    assert grid
    assert all(torch.equal(grid[name], batch[name]) and grid[name].dtype == torch.int64 for name in grid)


@given(st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=25, deadline=None)
def test_grid_of_any_size_holds(width: int, height: int) -> None:
    for model_type, config in (("qwen2_5_vl", QWEN), ("internvl", INTERN)):
        processor = load_image_processor(config)
        if max(width, height) > 200 * min(width, height):
            continue
        grid = grid_of(processor, model_type, width, height)
        batch = preprocess_images(processor, model_type, [Image.new("RGB", (width, height))])
        assert all(torch.equal(grid[name], batch[name]) for name in grid)


@pytest.mark.parametrize("num_frames", [1, 2, 5])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "internvl"])
def test_grid_of_a_video_is_what_preprocessing_gives(model_type: str, num_frames: int) -> None:
    processor = load_image_processor(QWEN if model_type == "qwen2_5_vl" else INTERN)
    grid = grid_of(processor, model_type, 70, 50, num_frames=num_frames, pixel_limits=LIMITS)
    batch = preprocess_video(processor, model_type, video(num_frames), pixel_limits=LIMITS)
    assert grid
    assert all(torch.equal(grid[name], batch[name]) for name in grid)


def test_grid_of_refuses_what_preprocessing_refuses() -> None:
    processor = load_image_processor(QWEN)
    with pytest.raises(InputError, match="an image of 4x1000: absolute aspect ratio"):
        grid_of(processor, "qwen2_5_vl", 4, 1000)
    for width, height, num_frames in ((0, 4, None), (4, 0, None), (4, 4, 0)):
        with pytest.raises(InputError, match="at least 1 of each"):
            grid_of(processor, "qwen2_5_vl", width, height, num_frames=num_frames)
