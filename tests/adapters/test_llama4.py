"""Llama 4: features are projected, the rotary embedding is that of transformers without complex numbers."""

import torch
from transformers.models.llama4.modeling_llama4 import vision_apply_rotary_emb

from onereplay.adapters.llama4 import _turn
from onereplay.encoder import Encoder
from tests.adapters.test_tile_models import assert_close, encode, made, pixels


def test_features_are_what_the_language_model_takes() -> None:
    """The stock method stops before the projector, which the model applies to its result."""
    with made("llama4-scout") as encoder:
        given = pixels(encoder, 3)
        found, _ = encode(encoder, pixel_values=given, aspect_ratios=[[2, 1]])
        model = encoder.adapter.model
        with torch.no_grad():
            tower = model.get_image_features(pixel_values=given).last_hidden_state
            expected = model.multi_modal_projector(tower.view(-1, tower.shape[-1]))
        assert found[0].shape == (12, model.config.text_config.hidden_size)
        assert tower.shape[-1] != expected.shape[-1]
        assert_close(found[0], expected)


def test_pairs_are_turned_as_complex_numbers_are() -> None:
    """fp32: a product and a sum each, in the same order; the two may differ by a fused rounding, 1e-6 of values of
    order one."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 17, 4, 16, generator=generator)
    angles = torch.randn(17, 1, 8, generator=generator)
    turns = torch.polar(torch.ones_like(angles), angles)
    for found, stock in zip(
        (_turn(part, torch.view_as_real(turns)) for part in (query, key)),
        vision_apply_rotary_emb(query, key, freqs_ci=turns),
        strict=True,
    ):
        torch.testing.assert_close(found, stock, rtol=0, atol=1e-6)


def test_the_users_modules_keep_their_forward() -> None:
    with made("llama4-scout") as encoder:
        assert isinstance(encoder, Encoder)
        assert all("forward" not in vars(layer.self_attn) for layer in encoder.adapter.model.vision_model.model.layers)
