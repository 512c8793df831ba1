"""MiniMax-M3: one sequence a clip, three axes of positions, a projector behind the tower.

Tolerance: the fp32 rule of `onereplay.checking`.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from onereplay import Encoder, EncoderCudaGraphConfig, accelerate
from onereplay.adapters import adapter_class
from onereplay.adapters.minimax_m3_vl import MiniMaxM3VL
from onereplay.checking import FP32_TOLERANCE
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.errors import UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_, vision_model
from onereplay.presets import get_preset, hf_config
from tests.adapters.test_failures import agrees, made

NAME, MODEL_TYPE = "minimax_m3_vl@tiny", "minimax_m3_vl"


def config_of(name: str = NAME) -> Any:
    return hf_config(get_preset(name))


def model_of() -> Any:
    parts = MiniMaxM3VL.parts
    model = vision_model(config_of(), device="cpu", dtype=torch.float32, parts=parts)
    random_weights_(model, parts)
    return model


def whole_model() -> Any:
    model = AutoModelForImageTextToText.from_config(config_of()).eval()
    random_weights_(model, tuple(name for name, _ in model.named_children()))
    return model


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1))


try:
    MiniMaxM3VL(config_of(), model_of())
except UnsupportedModelError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)


def plain(model: Any, pixels: Tensor, grid: Grid) -> Tensor:
    """One clip, step by step: `(tokens, hidden)`. Nothing is packed and no code of transformers runs."""
    tower, projector, config = model.vision_tower, model.multi_modal_projector, model.config.vision_config
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    axis = size // 3 // 2  # frequencies of one axis
    frequencies = 10000.0 ** (-torch.arange(axis) / axis)
    places = [
        (t, i + di, j + dj)
        for t in range(grid.t)
        for i in range(0, grid.h, 2)
        for j in range(0, grid.w, 2)
        for di in (0, 1)
        for dj in (0, 1)
    ]
    angles = (torch.tensor(places).float()[..., None] * frequencies).flatten(1).repeat(1, 2)[:, None]
    turned = angles.shape[-1]

    def rotate(rows: Tensor) -> Tensor:
        first, rest = rows[..., :turned], rows[..., turned:]
        left, right = first.chunk(2, dim=-1)
        return torch.cat([first * angles.cos() + torch.cat([-right, left], dim=-1) * angles.sin(), rest], dim=-1)

    hidden = pixels @ tower.embeddings.proj.weight.flatten(1).T
    hidden = tower.pre_layrnorm(hidden)
    for layer in tower.layers:
        normed, attention = layer.layer_norm1(hidden), layer.self_attn
        q, k, v = (
            part(normed).view(-1, heads, size) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        scores = torch.einsum("qhd,khd->hqk", rotate(q), rotate(k)) / size**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        hidden = hidden + attention.out_proj(mixed)
        hidden = hidden + layer.mlp.fc2(torch.nn.functional.gelu(layer.mlp.fc1(layer.layer_norm2(hidden))))
    gelu = torch.nn.functional.gelu
    hidden = projector.linear_2(gelu(projector.linear_1(hidden))).view(len(hidden) // 4, -1)
    merged: Tensor = projector.merge_linear_2(gelu(projector.merge_linear_1(hidden)))
    return merged


def test_a_batch_is_each_clip_by_an_independent_forward() -> None:
    grids = [Grid(1, 4, 6), Grid(1, 2, 2), Grid(4, 4, 4), Grid(3, 2, 6)]
    with made((64,), MODEL_TYPE) as encoder:
        inputs = encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(0))
        found = encoder.encode_inputs(**inputs)
        rows = torch.cat([inputs["pixel_values"], inputs["pixel_values_videos"]])
        assert encoder.report().replays == {"vision": {64: 1}}
        for features, grid, pixels in zip(found, grids, rows.split([grid.num_patches for grid in grids]), strict=True):
            with torch.no_grad():
                assert close(features, plain(encoder.adapter.model, pixels, grid)), grid


def test_frames_of_a_clip_see_each_other_and_know_their_order() -> None:
    with made((64,), MODEL_TYPE) as encoder:
        pixels = torch.randn(3 * 16, *encoder.adapter.pixel_shape, generator=torch.Generator().manual_seed(0))  # type: ignore[attr-defined]
        grid = torch.tensor([[3, 4, 4]])
        (clip,) = encoder.encode_inputs(pixel_values_videos=pixels, video_grid_thw=grid)
        apart = encoder.encode_inputs(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]] * 3))
        (turned,) = encoder.encode_inputs(
            pixel_values_videos=pixels.view(3, 16, -1).flip(0).flatten(0, 1), video_grid_thw=grid
        )
    assert (clip - torch.cat(apart)).abs().max() > 0.01
    assert (clip - turned.view(3, 4, -1).flip(0).flatten(0, 1)).abs().max() > 0.001


@pytest.mark.parametrize("frames", [2, 65, 600])
def test_a_clip_of_any_number_of_frames_takes_one_slot(frames: int) -> None:
    with made((640,), MODEL_TYPE, max_items_per_batch=2) as encoder:
        assert isinstance(agrees(encoder, [Grid(frames, 2, 2)]), Replay)


def test_a_clip_over_the_largest_budget_is_one_eager_forward() -> None:
    with made((64,), MODEL_TYPE) as encoder:
        step = agrees(encoder, [Grid(5, 4, 14)])
        assert isinstance(step, Eager)
        assert step.reason is Reason.OVER_LARGEST_BUDGET


@pytest.mark.parametrize("budget", [81, 83, 97])
def test_252x252_is_right(budget: int) -> None:
    with made((budget,), MODEL_TYPE) as encoder:
        assert isinstance(agrees(encoder, [Grid(1, 18, 18)]), Replay)


def test_the_published_size_plans_by_the_formula_of_tokens() -> None:
    """A quarter of the patches, all frames; at most 576 for an image of the processor (672x672 pixels)."""
    adapter = MiniMaxM3VL(config_of("minimax_m3_vl"))
    assert adapter.hidden_size == 6144
    assert adapter.pixel_shape == (1176,)
    items = adapter.items_of(image_grid_thw=[[1, 48, 48]], video_grid_thw=[[4, 54, 56]])
    assert [item.num_tokens for item in items] == [576, 3024]
    assert [item.sizes["vision"].sequences for item in items] == [1, 1]


def test_a_checkpoint_under_its_published_names_encodes_as_the_stock_model(tmp_path: Path) -> None:
    """`save_pretrained` writes `vision_tower.vision_model.*` and `patch_merge_mlp.*` again."""
    stock = whole_model()
    stock.save_pretrained(tmp_path)
    adapter = adapter_class(MODEL_TYPE)(stock.config)
    inputs = adapter.example_inputs([Grid(1, 18, 18), Grid(1, 4, 6)], torch.Generator().manual_seed(0))
    config = EncoderCudaGraphConfig(token_budgets=(128,))
    with (
        Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=config) as encoder,
        torch.no_grad(),
    ):
        found = encoder.encode_inputs(**inputs)
        expected = stock.get_image_features(**inputs).pooler_output
    assert close(torch.cat(found), torch.cat(list(expected)))


def test_an_accelerated_model_gives_stock_features_of_images_and_videos() -> None:
    stock, model = whole_model(), whole_model()
    adapter = adapter_class(MODEL_TYPE)(stock.config)
    grids = [Grid(1, 4, 6), Grid(1, 2, 2), Grid(3, 4, 4), Grid(2, 2, 2)]
    inputs = adapter.example_inputs(grids, torch.Generator().manual_seed(0))
    with accelerate(model, EncoderCudaGraphConfig(token_budgets=(64,))) as handle, torch.no_grad():
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            given = (inputs[pixels], inputs[f"{kind}_grid_thw"])
            found, expected = (getattr(each, f"get_{kind}_features")(*given).pooler_output for each in (model, stock))
            assert type(found) is type(expected)
            assert close(torch.cat(found), torch.cat(expected))
        assert handle.report().replays == {"vision": {64: 2}}


def test_a_tower_that_mixes_images_or_rotates_by_two_axes_is_refused() -> None:
    """transformers 5.17 has both faults."""
    model = model_of()
    rotary = SimpleNamespace(recomposition_frequencies=lambda freq: torch.cat([freq[:, 0], freq[:, 1]] * 2, dim=-1))
    attention = SimpleNamespace(forward=lambda hidden_states, attention_mask=None, **kwargs: None)
    mixing = SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)], rotary_emb=model.vision_tower.rotary_emb)
    for tower in (SimpleNamespace(layers=model.vision_tower.layers, rotary_emb=rotary), mixing):
        with pytest.raises(UnsupportedModelError, match=r"minimax_m3_vl in transformers .* install a newer one"):
            MiniMaxM3VL(model.config, SimpleNamespace(vision_tower=tower))


def test_the_metadata_of_a_clip_has_three_columns_and_one_length() -> None:
    piece = MiniMaxM3VL(config_of()).piece(Grid(2, 2, 4))
    assert piece["position_ids"].shape == (16, 3)
    assert piece["position_ids"][8].tolist() == [1, 0, 0]
    np.testing.assert_array_equal(piece["cu_seqlens"], [16])
