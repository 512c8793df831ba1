"""Images as files of the multi-path models: sizes without pixels are those of the pixels, in published proportions."""

import pytest
from PIL import Image

from onereplay.adapters import adapter_class
from onereplay.preprocess import grid_of, load_image_processor, preprocess_images
from onereplay.presets import get_preset, hf_config

SIZES = [(100, 80), (400, 200), (500, 700), (1700, 150), (640, 640)]


@pytest.mark.parametrize(("preset", "tile"), [("deepseek_ocr@tiny", 9), ("deepseek_ocr2@tiny", 144)])
def test_sizes_without_pixels_are_those_of_the_pixels(preset: str, tile: int) -> None:
    given = get_preset(preset)
    adapter = adapter_class(given.model_type)(hf_config(given))
    processor = load_image_processor(given.processor)
    images = [Image.new("RGB", size) for size in SIZES]
    inputs = preprocess_images(processor, given.model_type, images)
    batch = adapter.batch(**inputs)
    planned = [adapter.items_of(**grid_of(processor, given.model_type, *size))[0] for size in SIZES]
    assert list(batch.items) == planned
    tiles = [item.sizes["local"].tokens // tile if "local" in item.sizes else 0 for item in planned]
    assert tiles == inputs["num_local_patches"].tolist()
    assert tiles[0] == 0
    assert len(inputs["pixel_values_local"]) == sum(inputs["num_local_patches"].tolist())


@pytest.mark.parametrize(
    ("size", "grid"), [((640, 640), [1, 1]), ((1280, 640), [2, 1]), ((700, 1400), [1, 2]), ((1900, 2850), [2, 3])]
)
def test_tiles_of_deepseek_ocr_lie_as_published(size: tuple[int, int], grid: list[int]) -> None:
    processor = load_image_processor(get_preset("deepseek_ocr").processor)
    assert grid_of(processor, "deepseek_ocr", *size)["patches_grid"].tolist() == [grid]
