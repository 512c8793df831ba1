"""Towers that embed images: SigLIP, CLIP, DINOv2, DINOv3 on tiles, SigLIP 2 (NaFlex) packed.

Tolerance: the fp32 rule of `onereplay.checking`, 1e-5 of the largest reference value, unless a test says otherwise.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, scaled_dot_product_attention
from transformers import (
    AutoModel,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2ForImageClassification,
    SiglipForImageClassification,
)

from onereplay import Encoder, EncoderCudaGraphConfig, accelerate
from onereplay.checking import FP32_TOLERANCE
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.errors import ConfigError, InputError, UnsupportedModelError
from onereplay.loading import random_weights_
from onereplay.presets import get_preset, hf_config

PAIRS = ("siglip-so400m-384@tiny", "clip-b-32@tiny", "siglip2-so400m-naflex@tiny")
ALONE = (
    "siglip-base-224-vision@tiny",
    "clip-b-32-vision@tiny",
    "siglip2-so400m-naflex-vision@tiny",
    "dinov2-giant@tiny",
    "dinov3-vitl16@tiny",
)
TILES = tuple(name for name in (*PAIRS, *ALONE) if "naflex" not in name)
CONFIG = EncoderCudaGraphConfig(token_budgets=(64,))


def model_of(preset: str) -> Any:
    model = AutoModel.from_config(hf_config(get_preset(preset))).eval()
    random_weights_(model, tuple(name for name, _ in model.named_children()))
    for name in ("logit_scale", "logit_bias"):
        if hasattr(model, name):
            getattr(model, name).data.fill_(0.5)
    return model


def inputs_of(encoder: Encoder, number: int = 3) -> dict[str, Tensor]:
    path = next(iter(encoder.adapter.paths()))
    tokens = number * max(encoder.adapter.unit(path), 4)
    _, grids = next(found for found in encoder.adapter.layouts(path, tokens, number)[::-1] if len(found[1]) == number)
    return encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(0))


def stock_output(model: Any, inputs: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return model.get_image_features(**inputs) if hasattr(model, "get_image_features") else model(**inputs)


def close(found: Tensor, expected: Tensor) -> bool:
    largest = expected.abs().max().clamp(min=1)
    return found.shape == expected.shape and bool((found - expected).abs().max() <= FP32_TOLERANCE * largest)


@pytest.mark.parametrize("name", [*PAIRS, *ALONE])
def test_an_image_gives_one_row_the_pooled_embedding_of_the_stock_model(name: str) -> None:
    model = model_of(name)
    with Encoder(model, CONFIG) as encoder:
        inputs = inputs_of(encoder)
        found = encoder.encode_inputs(**inputs)
        assert [rows.shape[0] for rows in found] == [1, 1, 1]
        assert close(torch.cat(found), stock_output(model, inputs).pooler_output)
        assert sum(encoder.report().replays[next(iter(encoder.report().replays))].values()) == 1


@pytest.mark.parametrize("name", [*PAIRS, *ALONE])
def test_rows_are_the_last_hidden_state_without_padding(name: str) -> None:
    model = model_of(name)
    with Encoder(model, EncoderCudaGraphConfig(token_budgets=(64,), features="rows")) as encoder:
        inputs = inputs_of(encoder)
        table = stock_output(model, inputs).last_hidden_state
        counts = inputs["spatial_shapes"].prod(-1).tolist() if "spatial_shapes" in inputs else [table.shape[1]] * 3
        for found, rows, count in zip(encoder.encode_inputs(**inputs), table, counts, strict=True):
            assert close(found, rows[:count])


@pytest.mark.parametrize(("name", "tokens"), [("siglip-so400m-384", 27**2), ("clip-l-14-336", 24**2 + 1)])
def test_published_rows_an_image(name: str, tokens: int) -> None:
    preset = get_preset(name)
    from onereplay.adapters import adapter_class

    adapter = adapter_class(preset.model_type)(hf_config(preset))
    assert adapter.unit("vision") == tokens


@pytest.mark.parametrize(("name", "tokens"), [("dinov2-large", 16**2 + 1), ("dinov3-vitl16", 14**2 + 5)])
def test_dino_is_captured_for_what_the_published_processor_makes(name: str, tokens: int) -> None:
    from onereplay.encoder import planner

    preprocessor, _ = planner(f"preset:{name}", EncoderCudaGraphConfig())
    assert preprocessor.adapter.unit("vision") == tokens
    size = get_preset(name).processor.get("crop_size") or get_preset(name).processor["size"]
    assert preprocessor.adapter.tile_shape == (3, size["height"], size["width"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["dinov2-base@tiny", "dinov3-vitl16@tiny"])
def test_dino_of_another_size_is_eager_and_right_and_tile_size_captures_it(name: str) -> None:
    model = model_of(name)
    side = 3 * int(model.config.patch_size)
    pixels = torch.randn(2, 3, side, 2 * side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(pixels).pooler_output
    steps = []
    for options in ({}, {"tile_size": (side, 2 * side)}):
        with Encoder(model, EncoderCudaGraphConfig(token_budgets=(64,), **options)) as encoder:  # type: ignore[arg-type]
            batch = encoder.adapter.batch(pixel_values=pixels)
            assert close(torch.cat(encoder.manager.encode(batch)), expected)
            steps.append(encoder.manager.plan(batch).steps["vision"])
    assert isinstance(steps[0], Eager)
    assert steps[0].reason is Reason.UNSUPPORTED_INPUT
    assert isinstance(steps[1], Replay)


@pytest.mark.parametrize("name", ["siglip-base-224@tiny", "clip-b-32-vision@tiny"])
def test_a_tower_of_one_size_refuses_others_as_the_stock_model_does(name: str) -> None:
    with Encoder(model_of(name), CONFIG) as encoder:
        side = encoder.adapter.tile_shape[-1]  # type: ignore[attr-defined]
        with pytest.raises(InputError, match=f"takes {side}x{side}"):
            encoder.encode_inputs(pixel_values=torch.zeros(1, 3, side, side // 2))
        with pytest.raises(ConfigError, match=r"tile_size=\(7, 7\): .* alone; leave it out"):
            Encoder(model_of(name), EncoderCudaGraphConfig(tile_size=7))


def test_dinov3_does_not_read_the_cache_of_coordinates_of_transformers() -> None:
    """32 other sizes push a size out of that cache; a graph that read it would read freed memory."""
    model = model_of("dinov3-vitl16@tiny")
    with Encoder(model, CONFIG) as encoder:
        pixels = inputs_of(encoder)["pixel_values"]
        with torch.no_grad():
            expected = model(pixels).pooler_output
            found = torch.cat(encoder.encode_inputs(pixel_values=pixels))
            for sides in range(1, 40):
                model(torch.zeros(1, 3, 16, 16 * sides))
        assert close(found, expected)
        assert torch.equal(torch.cat(encoder.encode_inputs(pixel_values=pixels)), found)


def test_naflex_pooling_agrees_with_a_plain_one_image_at_a_time() -> None:
    """Positions by `interpolate`, layers on one image, one query in the head: no packing, no mask."""
    model = model_of("siglip2-so400m-naflex@tiny").vision_model
    table, head = model.embeddings.position_embedding.weight, model.head
    side, width = math.isqrt(len(table)), table.shape[1]
    sizes = [(2, 7), (4, 4), (1, 3), (5, 2)]
    pixels = [torch.randn(h * w, 768, generator=torch.Generator().manual_seed(h)) for h, w in sizes]
    expected = []
    with torch.no_grad():
        for (h, w), patches in zip(sizes, pixels, strict=True):
            square = table.T.reshape(1, width, side, side)
            places = interpolate(square, (h, w), mode="bilinear", antialias=True, align_corners=False)
            rows = (model.embeddings.patch_embedding(patches) + places.reshape(width, -1).T)[None]
            for layer in model.encoder.layers:
                rows = layer(rows, None)
            rows = model.post_layernorm(rows)
            weight, bias = head.attention.in_proj_weight.chunk(3), head.attention.in_proj_bias.chunk(3)
            q, k, v = (
                torch.nn.functional.linear(each, weight[place], bias[place])
                .unflatten(-1, (head.attention.num_heads, -1))
                .transpose(1, 2)
                for place, each in enumerate((head.probe, rows, rows))
            )
            asked = head.attention.out_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            expected.append((asked + head.mlp(head.layernorm(asked)))[0])
    longest = max(h * w for h, w in sizes)
    padded = torch.stack([torch.nn.functional.pad(each, (0, 0, 0, longest - len(each)), value=9.0) for each in pixels])
    with Encoder(model, CONFIG) as encoder:
        found = encoder.encode_inputs(pixel_values=padded, spatial_shapes=torch.tensor(sizes))
    assert close(torch.cat(found), torch.cat(expected))


@pytest.mark.parametrize("name", [*PAIRS, *ALONE])
def test_accelerate_gives_both_results_of_the_stock_call(name: str) -> None:
    stock, model = model_of(name), model_of(name)
    with accelerate(model, CONFIG) as handle:
        with Encoder(stock, CONFIG) as encoder:
            inputs = inputs_of(encoder)
        found, expected = stock_output(model, inputs), stock_output(stock, inputs)
        assert type(found) is type(expected)
        assert close(found.pooler_output, expected.pooler_output)
        if "spatial_shapes" not in inputs:
            assert close(found.last_hidden_state, expected.last_hidden_state)
        else:
            for rows, other, shape in zip(
                found.last_hidden_state, expected.last_hidden_state, inputs["spatial_shapes"].tolist(), strict=True
            ):
                assert close(rows[: math.prod(shape)], other[: math.prod(shape)])
        assert handle.report().batches == 1
    assert "forward" not in vars(model)
    assert close(stock_output(model, inputs).pooler_output, expected.pooler_output)


@pytest.mark.parametrize("name", ["siglip-base-224@tiny", "clip-b-32-vision@tiny"])
def test_a_call_that_asks_to_interpolate_goes_to_the_stock_method(name: str) -> None:
    model, stock = model_of(name), model_of(name)
    side = 2 * sides_of(model)
    pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    with accelerate(model, CONFIG) as handle, torch.no_grad():
        method = "get_image_features" if hasattr(model, "get_image_features") else "forward"
        found, expected = (
            getattr(each, method)(pixel_values=pixels, interpolate_pos_encoding=True) for each in (model, stock)
        )
        assert torch.equal(found.pooler_output, expected.pooler_output)
        assert handle.report().eager["vision"] == {Reason.UNSUPPORTED_INPUT.value: 1}


def sides_of(model: Any) -> int:
    return int(getattr(model.config, "vision_config", model.config).image_size)


def test_a_projection_on_the_vision_model_counts() -> None:
    config = hf_config(get_preset("clip-b-32-vision@tiny"))
    model = CLIPVisionModelWithProjection(config).eval()
    random_weights_(model, ("vision_model", "visual_projection"))
    with Encoder(model, CONFIG) as encoder:
        inputs = inputs_of(encoder)
        with torch.no_grad():
            expected = model(**inputs).image_embeds
        found = torch.cat(encoder.encode_inputs(**inputs))
    assert found.shape[1] == config.projection_dim != config.hidden_size
    assert close(found, expected)


def test_a_classifier_is_served_by_the_tower_below_it_and_one_without_is_refused() -> None:
    config = hf_config(get_preset("dinov2-base@tiny"))
    assert isinstance(config, Dinov2Config)
    model = Dinov2ForImageClassification(config).eval()
    with Encoder(model, CONFIG) as encoder:
        assert encoder.adapter.model is model.dinov2
    both = SiglipForImageClassification(hf_config(get_preset("siglip-base-224@tiny"))).eval()
    with Encoder(both, CONFIG) as encoder:  # it has the vision side of the pair
        assert encoder.adapter.model is both
    with pytest.raises(UnsupportedModelError, match="Dinov2Encoder has no such encoder"):
        Encoder(model.dinov2.encoder, CONFIG)


def test_a_tower_without_a_head_gives_rows_and_no_embedding() -> None:
    config = hf_config(get_preset("siglip-base-224-vision@tiny"))
    config.vision_use_head = False
    model = AutoModel.from_config(config).eval()
    with Encoder(model, CONFIG) as encoder:
        (rows,) = encoder.encode_inputs(pixel_values=torch.randn(1, 3, 64, 64))
        assert rows.shape == (16, 64)
    with pytest.raises(ConfigError, match="no pooling head; use 'rows'"):
        Encoder(model, EncoderCudaGraphConfig(features="embedding"))


def test_features_of_a_model_that_gives_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="features='embedding': internvl gives no single embedding"):
        Encoder.from_preset("internvl3-1b@tiny", config=EncoderCudaGraphConfig(features="embedding"))
    with pytest.raises(ConfigError, match=r"tile_size=\(448, 448\): internvl takes no other size"):
        Encoder.from_preset("internvl3-1b@tiny", config=EncoderCudaGraphConfig(tile_size=448))


@pytest.mark.parametrize("name", [*PAIRS, *ALONE])
def test_a_checkpoint_gives_its_vision_weights_alone(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path)
    with Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=CONFIG) as encoder:
        inputs = inputs_of(encoder)
        assert close(torch.cat(encoder.encode_inputs(**inputs)), stock_output(model, inputs).pooler_output)
        text = getattr(encoder.adapter.model, "text_model", None)
        assert text is None or not list(text.parameters())


def test_a_checkpoint_with_a_classifier_on_top_loads_without_it(tmp_path: Path) -> None:
    model = Dinov2ForImageClassification(hf_config(get_preset("dinov2-base@tiny"))).eval()
    model.save_pretrained(tmp_path)
    with Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=CONFIG) as encoder:
        inputs = inputs_of(encoder)
        assert close(torch.cat(encoder.encode_inputs(**inputs)), stock_output(model.dinov2, inputs).pooler_output)


@pytest.mark.parametrize("name", ["siglip-base-224@tiny", "clip-b-32@tiny", "dinov2-base@tiny"])
def test_images_go_through_the_published_processor(name: str) -> None:
    images = [Image.new("RGB", size, color) for size, color in (((90, 60), "red"), ((64, 200), "blue"))]
    with Encoder.from_preset(name, config=CONFIG) as encoder:
        found = encoder.encode(images)
        pixels = encoder.preprocessor.processor(images=images, return_tensors="pt")["pixel_values"]
        assert torch.equal(torch.cat(found), torch.cat(encoder.encode_inputs(pixel_values=pixels)))
