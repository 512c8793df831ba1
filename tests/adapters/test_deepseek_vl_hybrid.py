"""DeepSeek-VL hybrid: two pixel inputs in one path, and weights that nothing is kept of.

Tolerance: the fp32 rule of `onereplay.checking`.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from onereplay.checking import plain_features
from onereplay.core.plan import Replay
from onereplay.encoder import Encoder
from onereplay.errors import InputError
from tests.adapters.test_tile_models import assert_close, encode, made


@pytest.fixture(scope="module")
def encoder() -> Iterator[Encoder]:
    with made("deepseek_vl-7b") as found:
        yield found


def inputs(encoder: Encoder, num_images: int, seed: int = 0) -> dict[str, Tensor]:
    grids = encoder.adapter.layouts("vision", 4 * num_images, num_images)[0][1]
    return encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["pixel_values", "high_res_pixel_values"])
def test_both_inputs_matter_and_each_image_has_its_own_pair(encoder: Encoder, name: str) -> None:
    given = inputs(encoder, 3)
    plain, _ = encode(encoder, **given)
    given[name] = given[name].clone()
    given[name][1] += 1
    changed, step = encode(encoder, **given)
    assert isinstance(step, Replay)
    assert [torch.equal(one, other) for one, other in zip(plain, changed, strict=True)] == [True, False, True]


def test_joined_and_selected_batches_keep_the_pairs(encoder: Encoder) -> None:
    given = [inputs(encoder, count, seed) for seed, count in enumerate((1, 2, 1))]
    joined = encoder.adapter.join([encoder.adapter.batch(**each) for each in given])
    together = encoder.manager.encode(joined)
    alone = [rows for each in given for rows in encode(encoder, **each)[0]]
    for found, expected in zip(together, alone, strict=True):
        assert_close(found, expected)
    for found, place in zip(encoder.manager.encode(encoder.adapter.select(joined, [3, 1])), (3, 1), strict=True):
        assert_close(found, together[place])


@pytest.mark.parametrize("kept", ["pixel_values", "high_res_pixel_values"])
def test_one_input_alone_is_refused(encoder: Encoder, kept: str) -> None:
    with pytest.raises(InputError, match="pixel_values and high_res_pixel_values come together"):
        encoder.encode_inputs(**{kept: inputs(encoder, 1)[kept]})


def test_numbers_of_images_that_differ_are_refused(encoder: Encoder) -> None:
    given = {**inputs(encoder, 2), "pixel_values": inputs(encoder, 3)["pixel_values"]}
    with pytest.raises(InputError, match=r"high_res_pixel_values has shape \(2, 3, 80, 80\), pixel_values asks for"):
        encoder.encode_inputs(**given)


@pytest.mark.parametrize(
    "weight", ["high_res_vision_alpha", "high_res_vision_model.vision_encoder.layers.1.attn.rel_pos_h"]
)
def test_a_weight_changed_in_place_after_capture_shows(weight: str) -> None:
    """The position tables of SAM are derived from weights: none is kept."""
    with made("deepseek_vl-7b") as encoder:
        given = inputs(encoder, 2)
        before = torch.cat(encode(encoder, **given)[0])
        with torch.no_grad():
            encoder.adapter.model.get_parameter(weight).mul_(3)
        found, step = encode(encoder, **given)
        assert isinstance(step, Replay)
        assert not torch.allclose(torch.cat(found), before, rtol=1e-3)
        assert_close(torch.cat(found), plain_features(encoder.adapter, encoder.adapter.model, given))


def test_the_users_modules_keep_their_positions(encoder: Encoder) -> None:
    for layer in encoder.adapter.model.high_res_vision_model.vision_encoder.layers:
        assert "get_rel_pos" not in vars(layer.attn)
