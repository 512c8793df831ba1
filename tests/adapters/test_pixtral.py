"""Pixtral and Mistral 3: images cut out of a padded batch, the merge, odd sides.

Tolerance: float32, sums in another order; see `onereplay.checking`. What only moves padding is compared bit for bit.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, LlavaConfig

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_class
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.encoder import Encoder
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_, vision_model
from onereplay.preprocess import grid_of, load_image_processor, preprocess_images
from onereplay.presets import get_preset, hf_config
from tests.adapters.conftest import tiny_preset
from tests.adapters.test_failures import agrees, made

MODELS = ("llava", "mistral3")


@pytest.fixture(scope="module", params=MODELS)
def pixtral(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    with made((64, 128), request.param) as encoder:
        yield encoder


def inputs_of(encoder: Encoder, grids: list[Grid]) -> dict[str, Tensor]:
    return encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(0))


def test_images_of_any_shape_share_a_replay(pixtral: Encoder) -> None:
    assert isinstance(agrees(pixtral, [Grid(1, 4, 8), Grid(1, 2, 2), Grid(1, 6, 2)]), Replay)


def test_nan_in_the_padding_of_an_image_is_not_read(pixtral: Encoder) -> None:
    inputs = inputs_of(pixtral, [Grid(1, 4, 8), Grid(1, 2, 2), Grid(1, 6, 2)])
    clean = pixtral.encode_inputs(**inputs)
    dirty = torch.full_like(inputs["pixel_values"], torch.nan)
    for image, source, (height, width) in zip(
        dirty, inputs["pixel_values"], inputs["image_sizes"].tolist(), strict=True
    ):
        image[:, :height, :width] = source[:, :height, :width]
    found = pixtral.encode_inputs(pixel_values=dirty, image_sizes=inputs["image_sizes"])
    assert all(torch.equal(rows, other) for rows, other in zip(found, clean, strict=True))


def test_patches_are_views_of_pixels_on_the_host(pixtral: Encoder) -> None:
    """The copy into the pinned buffer is then the only one."""
    inputs = inputs_of(pixtral, [Grid(1, 4, 8), Grid(1, 2, 2)])
    batch = pixtral.adapter.batch(**inputs)
    storage = inputs["pixel_values"].untyped_storage().data_ptr()
    assert all(rows.untyped_storage().data_ptr() == storage for rows in batch.pixels)
    assert sum(len(rows) for rows in batch.pixels) == 4 * 8 + 2 * 2


def test_odd_sides_are_right(pixtral: Encoder) -> None:
    """With a merge the last row and column belong to no token, as in transformers, but are attended to."""
    step = agrees(pixtral, [Grid(1, 5, 7), Grid(1, 3, 3), Grid(1, 4, 5)])
    assert isinstance(step, Replay)


def test_a_single_token_is_right_where_transformers_fails() -> None:
    with made((64,), "mistral3") as encoder:
        one, other = inputs_of(encoder, [Grid(1, 2, 2)]), inputs_of(encoder, [Grid(1, 2, 2), Grid(1, 2, 4)])
        other["pixel_values"][0, :, :, :28] = one["pixel_values"][0]
        expected = plain_features(encoder.adapter, encoder.adapter.model, other)[:1]
        (found,) = encoder.encode_inputs(**one)
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max()


def test_images_without_sizes_fill_the_pixels(pixtral: Encoder) -> None:
    inputs = inputs_of(pixtral, [Grid(1, 4, 4)] * 2)
    sized, whole = pixtral.encode_inputs(**inputs), pixtral.encode_inputs(pixel_values=inputs["pixel_values"])
    assert all(torch.equal(rows, other) for rows, other in zip(sized, whole, strict=True))


def test_inputs_that_do_not_fit_are_refused_with_the_rule(pixtral: Encoder) -> None:
    inputs = inputs_of(pixtral, [Grid(1, 4, 4)])
    pixels, sizes = inputs["pixel_values"], inputs["image_sizes"]
    for given, message in (
        ({"image_sizes": sizes}, "give it too"),
        ({"pixel_values": pixels[0]}, "takes \\(images, 3, height, width\\)"),
        ({"pixel_values": pixels, "image_sizes": sizes + 1}, "image_sizes asks for"),
        ({"pixel_values": pixels, "image_sizes": sizes.repeat(2, 1)}, "image_sizes asks for"),
        ({"pixel_values": pixels, "image_sizes": torch.tensor([[13, 4]])}, "has no token"),
        ({"pixel_values": pixels, "image_sizes": sizes[0]}, "must have 2 columns"),
    ):
        with pytest.raises(InputError, match=message):
            pixtral.encode_inputs(**given)


def test_an_image_over_the_longest_edge_is_one_eager_forward() -> None:
    """65x64 patches of 16 pixels, where the processor stops at 1,024: its rows fit the budget, its sequence does not
    fit `max_seqlen`."""
    adapter = adapter_class("llava")(hf_config(get_preset("pixtral-12b")))
    (capacity,) = adapter.capacities("vision", EncoderCudaGraphConfig(token_budgets=(5120,)))
    assert capacity.longest == 64 * 64
    (item,) = adapter.items_of(image_sizes=[[65 * 16, 64 * 16]])
    assert item.sizes["vision"].longest > capacity.longest
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    whole = hf_config(get_preset(tiny_preset("llava")))
    whole.vision_config.image_size = 64
    parts = adapter_class("llava").parts
    model = vision_model(whole, device="cpu", dtype=torch.float32, parts=parts)
    random_weights_(model, parts)
    with Encoder(model, config) as encoder:
        step = agrees(encoder, [Grid(1, 5, 4)])
        assert isinstance(step, Eager)
        assert step.reason is Reason.SEQUENCE_TOO_LONG
        assert isinstance(agrees(encoder, [Grid(1, 4, 4)] * 4), Replay)


@pytest.mark.parametrize(
    ("name", "value"),
    [("vision_feature_layer", -2), ("vision_feature_select_strategy", "default"), ("vision_feature_layer", [-1, -2])],
)
def test_another_feature_layer_is_refused(name: str, value: object) -> None:
    config = hf_config(get_preset(tiny_preset("llava")))
    setattr(config, name, value)
    with pytest.raises(UnsupportedModelError, match="use a pixtral tower, -1 and 'full'"):
        adapter_class("llava")(config)


def test_a_llava_of_another_tower_is_refused() -> None:
    config = LlavaConfig(vision_feature_layer=-1, vision_feature_select_strategy="full")
    with pytest.raises(UnsupportedModelError, match="'clip_vision_model' tower"):
        adapter_class("llava")(config)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_saved_checkpoint_loads_and_gives_the_stock_features(model_type: str, tmp_path: Path) -> None:
    whole = AutoModelForImageTextToText.from_config(hf_config(get_preset(tiny_preset(model_type)))).float().eval()
    random_weights_(whole, ("model",), seed=3)
    whole.save_pretrained(tmp_path)
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    with Encoder.from_pretrained(tmp_path, dtype=torch.float32, config=config) as encoder:
        inputs = inputs_of(encoder, [Grid(1, 4, 6), Grid(1, 2, 2)])
        found = torch.cat(encoder.encode_inputs(**inputs))
        expected = plain_features(encoder.adapter, whole.model, inputs)
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("preset", "width", "height", "pixels", "tokens"),
    [
        ("pixtral-12b", 64, 64, (64, 64), 16),
        ("pixtral-12b", 640, 480, (480, 640), 1200),
        ("pixtral-12b", 3000, 2000, (688, 1024), 43 * 64),
        ("mistral3-24b", 28, 28, (28, 28), 1),
        ("mistral3-24b", 640, 480, (504, 644), 18 * 23),
        ("mistral3-24b", 4000, 4000, (1540, 1540), 3025),
    ],
)
def test_an_image_has_the_published_size_and_tokens(
    preset: str, width: int, height: int, pixels: tuple[int, int], tokens: int
) -> None:
    """Sides are cut to the longest edge and rounded up to whole tokens (`PixtralProcessor` asks for merged patches)."""
    found = get_preset(preset)
    processor = load_image_processor(found.processor)
    adapter = adapter_class(found.model_type)(hf_config(found))
    sizes = grid_of(processor, found.model_type, width, height)
    assert sizes["image_sizes"].tolist() == [[*pixels]]
    assert [item.num_tokens for item in adapter.items_of(**sizes)] == [tokens]


@pytest.mark.parametrize("preset", ["pixtral-12b", "mistral3-24b"])
def test_images_of_several_shapes_are_joined_as_the_processor_joins_them(preset: str) -> None:
    found = get_preset(preset)
    processor = load_image_processor(found.processor)
    images = [Image.effect_noise(size, 90).convert("RGB") for size in ((90, 40), (30, 120), (60, 60))]
    batch = preprocess_images(processor, found.model_type, images)
    side = found.config["vision_config"]["patch_size"] * found.config.get("spatial_merge_size", 1)
    expected = processor(images=images, patch_size={"height": side, "width": side}, return_tensors="pt")
    assert all(torch.equal(batch[name], expected[name]) for name in ("pixel_values", "image_sizes"))
