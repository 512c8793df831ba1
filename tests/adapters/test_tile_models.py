"""What models of tiles have in common, beside the claims of `onereplay check`: counts under the processors' names,
published numbers of tokens, checkpoints.

Tolerance of features: the fp32 rule of `onereplay.checking`, 1e-5 of the largest reference value.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_class
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.core.plan import Eager, Replay
from onereplay.encoder import Encoder
from onereplay.errors import InputError
from onereplay.loading import random_weights_
from onereplay.preprocess import load_image_processor
from onereplay.presets import get_preset, hf_config

CONFIG = EncoderCudaGraphConfig(token_budgets=(16, 64), backend="traced")
NAMES = {
    "gemma3": "gemma3-4b",
    "deepseek_vl": "deepseek_vl-1.3b",
    "deepseek_vl_hybrid": "deepseek_vl-7b",
    "llama4": "llama4-scout",
    "idefics3": "idefics3-8b",
    "smolvlm": "smolvlm-2.2b",
}


def made(name: str) -> Encoder:
    return Encoder.from_preset(f"{name}@tiny", config=CONFIG)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)


def pixels(encoder: Encoder, num_tiles: int, seed: int = 0) -> Tensor:
    shape = encoder.adapter.tile_shape  # type: ignore[attr-defined]
    return torch.randn(num_tiles, *shape, generator=torch.Generator().manual_seed(seed))


def encode(encoder: Encoder, **inputs: Any) -> tuple[list[Tensor], Replay | Eager]:
    batch = encoder.adapter.batch(**inputs)
    return encoder.manager.encode(batch), encoder.manager.plan(batch).steps["vision"]


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("name", "tokens", "rows"),
    [
        ("internvl3-78b", 256, 1025),
        ("internvl3_5-8b", 256, 1025),
        ("gemma3-27b", 256, 4096),
        ("deepseek_vl-1.3b", 576, 576),
        ("deepseek_vl-7b", 576, 576),
        ("llama4-maverick", 144, 577),
        ("idefics3-8b", 169, 676),
        ("smolvlm-2.2b", 81, 729),
        ("smolvlm-500m", 64, 1024),
        ("smolvlm-256m", 64, 1024),
    ],
)
def test_a_tile_of_the_published_size_has_the_published_number_of_tokens(name: str, tokens: int, rows: int) -> None:
    preset = get_preset(name)
    adapter: Any = adapter_class(preset.model_type)(hf_config(preset))
    sides = adapter.tile_shape[1:]
    assert (adapter.tile_tokens, adapter.patches_of(*sides)) == (tokens, rows)
    (item,) = adapter.items_of(num_patches=[13])
    assert item.num_tokens == 13 * tokens


@pytest.mark.parametrize("name", ["gemma3-4b", "deepseek_vl-1.3b", "llama4-scout"])
def test_a_tile_of_a_size_without_positions_is_refused(name: str) -> None:
    with made(name) as encoder, pytest.raises(InputError, match=r"needs a square of (56x56|32x32), the one size"):
        encoder.encode_inputs(pixel_values=torch.zeros(1, 3, 64, 64))


# ------------------------------------------------------------------ counts


@pytest.mark.parametrize(
    ("name", "counts", "tiles"),
    [
        ("internvl3-38b", {"num_patches": [1, 13]}, [1, 13]),
        ("internvl3-38b", {"num_patches": [3], "num_frames": torch.tensor([8, 1])}, [3, 8, 1]),
        ("gemma3-4b", {"num_crops": torch.tensor([0, 4, 0, 2])}, [1, 5, 1, 3]),
        ("gemma3-4b", {"num_patches": [2, 3]}, [2, 3]),
        ("llama4-scout", {"aspect_ratios": torch.tensor([[1, 1], [2, 3], [1, 2]])}, [1, 7, 3]),
        ("deepseek_vl-1.3b", {}, [1, 1, 1]),
        ("idefics3-8b", {"rows": [[0, 3], [2]], "cols": [[0, 4], [1]]}, [1, 13, 3]),
        ("smolvlm-2.2b", {"num_frames": [4]}, [4]),
    ],
)
def test_tiles_are_counted_under_the_names_of_the_processors(
    name: str, counts: dict[str, Any], tiles: list[int]
) -> None:
    with made(name) as encoder:
        given = pixels(encoder, sum(tiles))
        found, step = encode(encoder, pixel_values=given, **counts)
        assert [len(rows) for rows in found] == [count * encoder.adapter.unit("vision") for count in tiles]
        assert isinstance(step, Replay) == (sum(tiles) <= 16)
        inputs = {"pixel_values": given.unsqueeze(0) if name.startswith(("idefics3", "smolvlm")) else given}
        assert_close(torch.cat(found), plain_features(encoder.adapter, encoder.adapter.model, inputs))
        planned = encoder.adapter.items_of(**counts)
        assert [item.num_tokens for item in planned] == ([len(rows) for rows in found] if counts else [])


@pytest.mark.parametrize(
    ("name", "counts", "message"),
    [
        ("gemma3-4b", {"num_crops": [1, 1]}, "num_crops adds up to 4 tiles, pixel_values has 3"),
        ("gemma3-4b", {"num_crops": [-1]}, "must be integers of at least 0"),
        ("gemma3-4b", {"num_crops": 2}, "must be a list of integers of at least 0"),
        ("gemma3-4b", {"num_frames": [3]}, "does not take num_frames; it takes pixel_values, num_patches, num_crops"),
        ("llama4-scout", {"aspect_ratios": [[2, 2]]}, "aspect_ratios adds up to 5 tiles, pixel_values has 3"),
        ("llama4-scout", {"aspect_ratios": [[2]]}, "aspect_ratios must have 2 columns"),
        ("idefics3-8b", {"rows": [[1]]}, "rows and cols come together"),
        ("idefics3-8b", {"rows": [["a"]], "cols": [[1]]}, "rows=.* must be lists of integers"),
        ("idefics3-8b", {"num_patches": [2]}, "num_patches adds up to 2 tiles, pixel_values has 3"),
        ("internvl3-8b", {"num_patches": [0, 3]}, "must be positive integers, one an image"),
    ],
)
def test_counts_that_do_not_fit_are_refused(name: str, counts: dict[str, Any], message: str) -> None:
    with made(name) as encoder, pytest.raises(InputError, match=message):
        encoder.encode_inputs(pixel_values=pixels(encoder, 3), **counts)


# ------------------------------------------------------------------ files

PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


@pytest.mark.parametrize(
    ("name", "options", "tiles"),
    [
        ("gemma3-4b", {}, [1, 1]),
        ("gemma3-4b", PAN_AND_SCAN, [4, 1]),
        ("deepseek_vl-1.3b", {}, [1, 1]),
        ("deepseek_vl-7b", {}, [1, 1]),
    ],
)
def test_images_are_the_tiles_that_the_processor_makes(name: str, options: dict[str, Any], tiles: list[int]) -> None:
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (50, width, 3), np.uint8)) for width in (150, 50)]
    settings = {**get_preset(f"{name}@tiny").processor, **options}
    with made(name) as first, Encoder(first.adapter.model, CONFIG, processor=settings) as encoder:
        found = encoder.encode(images)
        assert [len(rows) for rows in found] == [4 * count for count in tiles]
        assert [encoder.preprocessor.item(image)[0].num_tokens for image in images] == [4 * count for count in tiles]
        given = load_image_processor(settings)(images=images, return_tensors="pt")
        assert_close(torch.cat(found), plain_features(encoder.adapter, encoder.adapter.model, given))


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("model_type", sorted(NAMES))
def test_a_saved_whole_model_loads_and_gives_the_stock_features(model_type: str, tmp_path: Path) -> None:
    whole = AutoModelForImageTextToText.from_config(hf_config(get_preset(f"{NAMES[model_type]}@tiny"))).eval()
    random_weights_(whole, tuple(name for name, _ in whole.named_children()), 0)
    whole.save_pretrained(tmp_path)
    with Encoder.from_pretrained(tmp_path, config=CONFIG) as encoder:
        inputs = encoder.adapter.example_inputs(
            encoder.adapter.layouts("vision", 12, 8)[0][1], torch.Generator().manual_seed(0)
        )
        found, step = encode(encoder, **inputs)
        assert isinstance(step, Replay)
        stock = getattr(whole, "model", whole)
        assert_close(torch.cat(found), plain_features(encoder.adapter, stock, inputs))
