"""Idefics3 and SmolVLM: padding images, masks, positions, images of several sizes in one batch.

Tolerance: the fp32 rule of `onereplay.checking`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters.idefics3 import MASKED, _places
from onereplay.checking import plain_features
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.encoder import Encoder
from onereplay.errors import InputError
from onereplay.preprocess import load_image_processor
from onereplay.presets import get_preset
from tests.adapters.test_tile_models import assert_close, encode, made, pixels

NAMES = ("idefics3-8b", "smolvlm-2.2b", "smolvlm-500m")


@pytest.fixture(scope="module", params=NAMES)
def encoder(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    with made(request.param) as found:
        yield found


def samples(encoder: Encoder, *tiles: int) -> Tensor:
    """A sample with as many random tiles as each number says, padded with zeros to the most."""
    found = torch.zeros(len(tiles), max(tiles), *encoder.adapter.tile_shape)  # type: ignore[attr-defined]
    for row, count in enumerate(tiles):
        found[row, :count] = pixels(encoder, count, seed=row)
    return found


def mask_of(given: Tensor, *, padding: int = 0) -> Tensor:
    """All ones on tiles that are not zero, `padding` on the others."""
    mask = torch.full((*given.shape[:2], *given.shape[3:]), padding)
    mask[(given != 0).flatten(2).any(-1)] = 1
    return mask


def stock(encoder: Encoder, given: dict[str, Any]) -> Tensor:
    return plain_features(encoder.adapter, encoder.adapter.model, given)


# ------------------------------------------------------------------ padding images


@pytest.mark.parametrize("padding", [None, 0, 1], ids=["no mask", "masked", "a mask of ones, as for videos"])
def test_padding_images_are_left_out_and_a_sample_is_an_item(encoder: Encoder, padding: int | None) -> None:
    given: dict[str, Any] = {"pixel_values": samples(encoder, 1, 5, 2)}
    if padding is not None:
        given["pixel_attention_mask"] = mask_of(given["pixel_values"], padding=padding)
    found, step = encode(encoder, **given)
    assert isinstance(step, Replay)
    assert [len(rows) for rows in found] == [4, 20, 8]
    assert_close(torch.cat(found), stock(encoder, given))


def test_a_sample_without_images_has_no_tokens(encoder: Encoder) -> None:
    found, step = encode(encoder, pixel_values=samples(encoder, 2, 0, 1))
    assert isinstance(step, Replay)
    assert [len(rows) for rows in found] == [8, 0, 4]


def test_counts_split_samples_into_images(encoder: Encoder) -> None:
    given = samples(encoder, 3, 1)
    whole, _ = encode(encoder, pixel_values=given)
    split, _ = encode(encoder, pixel_values=given, num_patches=[1, 2, 1])
    assert [len(rows) for rows in split] == [4, 8, 4]
    assert torch.equal(torch.cat(split), torch.cat(whole))


def test_one_value_in_the_last_row_of_a_tile_makes_it_an_image(encoder: Encoder) -> None:
    given = samples(encoder, 2, 1)
    given[1, 1, 0, -1, -1] = 1
    found, _ = encode(encoder, pixel_values=given)
    assert [len(rows) for rows in found] == [8, 8]
    assert_close(torch.cat(found), stock(encoder, {"pixel_values": given}))


# ------------------------------------------------------------------ masks


def partly_hidden(encoder: Encoder, given: Tensor, *places: tuple[int, int]) -> Tensor:
    """Whole masks; of these tiles only the upper two thirds and the left half of the patches are seen."""
    mask = mask_of(given)
    patch = encoder.adapter.patch  # type: ignore[attr-defined]
    side = given.shape[-1] // patch
    for place in places:
        mask[place] = 0
        mask[place][: 2 * side // 3 * patch, : side // 2 * patch] = 1
    return mask


def test_partly_hidden_tiles_run_eagerly_and_are_right(encoder: Encoder) -> None:
    pixel_values = samples(encoder, 2, 1, 3)
    given = {"pixel_values": pixel_values, "pixel_attention_mask": partly_hidden(encoder, pixel_values, (0, 1), (2, 0))}
    batch = encoder.adapter.batch(**given)
    assert [item.unsupported for item in batch.items] == [MASKED, "", MASKED]
    found, step = encode(encoder, **given)
    assert isinstance(step, Eager)
    assert step.reason is Reason.UNSUPPORTED_INPUT
    assert MASKED in step.detail
    assert_close(torch.cat(found), stock(encoder, given))
    unmasked, _ = encode(encoder, pixel_values=pixel_values)
    assert not torch.allclose(found[0], unmasked[0], rtol=1e-3), "what is hidden matters"
    assert_close(found[1], unmasked[1])


def test_a_named_attention_takes_masks_too() -> None:
    config = EncoderCudaGraphConfig(token_budgets=(16,), backend="traced", attention="reference")
    with Encoder.from_preset("idefics3-8b@tiny", config=config) as encoder:
        pixel_values = samples(encoder, 2)
        mask = partly_hidden(encoder, pixel_values, (0, 0))
        given = {"pixel_values": pixel_values, "pixel_attention_mask": mask}
        assert_close(torch.cat(encode(encoder, **given)[0]), stock(encoder, given))
        assert_close(
            torch.cat(encode(encoder, pixel_values=pixel_values)[0]), stock(encoder, {"pixel_values": pixel_values})
        )


def test_whole_items_of_a_batch_with_masks_are_replayed_once_they_are_alone(encoder: Encoder) -> None:
    pixel_values = samples(encoder, 2, 1)
    mask = partly_hidden(encoder, pixel_values, (1, 0))
    batch = encoder.adapter.batch(pixel_values=pixel_values, pixel_attention_mask=mask)
    alone = encoder.adapter.select(batch, [0])
    assert isinstance(encoder.manager.plan(alone).steps["vision"], Replay)
    assert_close(encoder.manager.encode(alone)[0], encode(encoder, pixel_values=pixel_values[:1])[0][0])
    joined = encoder.adapter.join([alone, encoder.adapter.batch(pixel_values=pixel_values[:1]), batch])
    features = encoder.manager.encode(joined)
    assert_close(features[0], features[1])
    assert_close(features[0], features[2])
    assert_close(features[3], encoder.manager.encode(batch)[1])


def test_a_mask_that_hides_less_than_a_patch_leaves_the_tile_whole(encoder: Encoder) -> None:
    pixel_values = samples(encoder, 2)
    mask = mask_of(pixel_values)
    mask[..., ::2, :] = 0
    given = {"pixel_values": pixel_values, "pixel_attention_mask": mask}
    found, step = encode(encoder, **given)
    assert isinstance(step, Replay)
    assert_close(torch.cat(found), stock(encoder, given))


def test_a_mask_of_another_shape_is_refused(encoder: Encoder) -> None:
    given = samples(encoder, 2)
    with pytest.raises(InputError, match="a mask has the shape of the pixels without channels"):
        encoder.encode_inputs(pixel_values=given, pixel_attention_mask=mask_of(given)[..., 1:])


# ------------------------------------------------------------------ positions


@pytest.mark.parametrize("side", [4, 6, 8, 24, 26, 27, 32, 70])
def test_positions_are_those_of_the_stock_embeddings(side: int) -> None:
    """Whole tiles of every published side, and corners of them."""
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionConfig, Idefics3VisionEmbeddings

    config = Idefics3VisionConfig(hidden_size=1, image_size=2 * side, patch_size=2, num_channels=1)
    embeddings = Idefics3VisionEmbeddings(config)
    embeddings.patch_embedding.weight.data.zero_()
    embeddings.patch_embedding.bias.data.zero_()
    embeddings.position_embedding.weight.data = torch.arange(side**2, dtype=torch.float32)[:, None]
    corners = [(side, side), (side, side // 2), (side // 2 + 1, side), (1, 1)]
    seen = torch.zeros(len(corners), side, side, dtype=torch.bool)
    for mask, (rows, columns) in zip(seen, corners, strict=True):
        mask[:rows, :columns] = True
    with torch.no_grad():
        stock_places = embeddings(torch.zeros(len(corners), 1, 2 * side, 2 * side), seen)[..., 0]
    assert torch.equal(_places(seen, side), stock_places.long())


# ------------------------------------------------------------------ files


def test_images_of_several_sizes_are_what_the_padded_batch_of_the_processor_gives(encoder: Encoder) -> None:
    name = next(name for name in NAMES if get_preset(f"{name}@tiny").processor == encoder.preprocessor._given)
    side = encoder.adapter.tile_shape[-1]  # type: ignore[attr-defined]
    random = np.random.default_rng(0)
    sizes = [(2 * side, side), (3 * side, 3 * side), (side // 2, side)]
    images = [Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)) for width, height in sizes]
    processor = load_image_processor(get_preset(f"{name}@tiny").processor)
    padded = processor(images=[[image] for image in images], return_tensors="pt", return_row_col_info=True)
    counts = [rows[0] * cols[0] + 1 for rows, cols in zip(padded["rows"], padded["cols"], strict=True)]
    assert len(set(counts)) > 1
    found = encoder.encode(images)
    assert [len(rows) for rows in found] == [4 * count for count in counts]
    given = {name: padded[name] for name in ("pixel_values", "pixel_attention_mask")}
    assert_close(torch.cat(found), stock(encoder, given))
    nested = encoder.encode_inputs(**given, rows=padded["rows"], cols=padded["cols"])
    for one, other in zip(found, nested, strict=True):
        assert_close(one, other)
    planned = [encoder.preprocessor.item(image)[0].num_tokens for image in images]
    assert planned == [len(rows) for rows in found]
