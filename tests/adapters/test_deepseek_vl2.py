"""DeepSeek-VL2: against a plain implementation on the published weight names, its counts, its processor, its refusals.

Tolerance: float32, 1e-5 of the largest value (see `onereplay.checking`): the same sums in another order.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

from onereplay import EncoderCudaGraphConfig, accelerate, models
from onereplay.adapters.deepseek_vl2 import DeepseekVL2
from onereplay.checking import FP32_TOLERANCE
from onereplay.encoder import Encoder, planner
from onereplay.errors import CheckpointError, ConfigError, InputError, UnsupportedModelError
from onereplay.presets import get_preset, hf_config
from tests.adapters.checkpoints import drawn, write_checkpoint

TINY, FULL = "deepseek_vl2@tiny", "deepseek_vl2"
CONFIG = EncoderCudaGraphConfig(token_budgets=(64, 128), backend="traced")
WIDTH, LAYERS, HEADS, HIDDEN, PATCHES = 64, 2, 4, 32, 9
"""Of the tiny preset."""


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a tiny checkpoint.

    Source: the modules of `siglip_vit.py` and `modeling_deepseek_vl_v2.py` in deepseek-ai/DeepSeek-VL2; a public list
    of the checkpoints' names in Ascend/MindSpeed-MM has the same. The pooling head is published and not used.
    """
    inner = int(WIDTH * 3.75)
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (WIDTH, 3, 14, 14),
        "vision.patch_embed.proj.bias": (WIDTH,),
        "vision.pos_embed": (1, PATCHES, WIDTH),
        "vision.norm.weight": (WIDTH,),
        "vision.norm.bias": (WIDTH,),
        "vision.attn_pool.latent": (1, 1, WIDTH),
        "vision.attn_pool.q.weight": (WIDTH, WIDTH),
        "vision.attn_pool.kv.weight": (2 * WIDTH, WIDTH),
        "vision.attn_pool.mlp.fc1.weight": (inner, WIDTH),
        "projector.layers.0.weight": (HIDDEN, 4 * WIDTH),
        "projector.layers.0.bias": (HIDDEN,),
        "projector.layers.2.weight": (HIDDEN, HIDDEN),
        "projector.layers.2.bias": (HIDDEN,),
        "image_newline": (HIDDEN,),
        "view_seperator": (HIDDEN,),
        "language.model.embed_tokens.weight": (7, HIDDEN),
        "language.model.norm.weight": (HIDDEN,),
        "language.lm_head.weight": (7, HIDDEN),
    }
    linears = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH), "mlp.fc1": (inner, WIDTH)}
    linears["mlp.fc2"] = (WIDTH, inner)
    for layer in range(LAYERS):
        for name, shape in linears.items():
            shapes[f"vision.blocks.{layer}.{name}.weight"] = shape
            shapes[f"vision.blocks.{layer}.{name}.bias"] = shape[:1]
        for norm in ("norm1", "norm2"):
            shapes[f"vision.blocks.{layer}.{norm}.weight"] = shapes[f"vision.blocks.{layer}.{norm}.bias"] = (WIDTH,)
    return shapes


def plain(weights: Mapping[str, Tensor], pixels: Tensor, crops: list[tuple[int, int]]) -> list[Tensor]:
    """The published computation, one tile at a time, from the weights alone."""
    found, start = [], 0
    for across, down in crops:
        tiles = [plain_tile(weights, tile) for tile in pixels[start : start + 1 + across * down]]
        start += 1 + across * down
        newline = weights["image_newline"]
        rows = [torch.cat([line, newline[None]]) for line in tiles[0]]
        rows.append(weights["view_seperator"][None])
        for row in range(down):
            for line in range(tiles[0].shape[0]):
                parts = [tiles[1 + row * across + column][line] for column in range(across)]
                rows.append(torch.cat([*parts, newline[None]]))
        found.append(torch.cat(rows))
    return found


def plain_tile(weights: Mapping[str, Tensor], tile: Tensor) -> Tensor:
    """`(2, 2, hidden)` of a tile of 48 pixels."""

    def linear(name: str, rows: Tensor) -> Tensor:
        return F.linear(rows, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)

    kernel, bias = weights["vision.patch_embed.proj.weight"], weights["vision.patch_embed.proj.bias"]
    hidden = torch.stack(
        [
            (kernel * tile[:, 14 * row : 14 * (row + 1), 14 * column : 14 * (column + 1)]).sum((1, 2, 3)) + bias
            for row in range(3)
            for column in range(3)
        ]
    )
    hidden = hidden + weights["vision.pos_embed"][0]
    for layer in range(LAYERS):
        block = f"vision.blocks.{layer}"
        query, key, value = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", hidden)).split(WIDTH, dim=1)
        heads = []
        for head in range(HEADS):
            own = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            scores = query[:, own] @ key[:, own].T / (WIDTH / HEADS) ** 0.5
            heads.append(scores.softmax(-1) @ value[:, own])
        hidden = hidden + linear(f"{block}.attn.proj", torch.cat(heads, dim=1))
        inner = F.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", hidden)), approximate="tanh")
        hidden = hidden + linear(f"{block}.mlp.fc2", inner)
    picture = norm("vision.norm", hidden).view(3, 3, WIDTH).permute(2, 0, 1)
    units = F.unfold(F.pad(picture, (0, 1, 0, 1))[None], 2, stride=2)[0].T
    return linear("projector.layers.2", F.gelu(linear("projector.layers.0", units))).view(2, 2, HIDDEN)


def published_config() -> dict[str, Any]:
    """The tiny preset's, with a language model that no class here knows."""
    config = dict(get_preset(TINY).config)
    config["language_config"] = {"model_type": "deepseek_v9", "hidden_size": HIDDEN, "rope_scaling": {"type": "yarn"}}
    return config


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return drawn(published_shapes())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("vl2"), published_config(), weights)


def inputs(crops: list[tuple[int, int]], seed: int = 0) -> dict[str, Tensor]:
    tiles = sum(1 + across * down for across, down in crops)
    pixels = torch.randn(tiles, 3, 48, 48, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "images_spatial_crop": torch.tensor(crops)}


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [rows.shape for rows in found] == [rows.shape for rows in expected]
    for rows, wanted in zip(found, expected, strict=True):
        assert (rows - wanted).abs().max() <= FP32_TOLERANCE * wanted.abs().max().clamp(min=1)


# --- numbers


def test_replay_eager_and_the_plain_model_are_the_published_computation(
    checkpoint: Path, weights: dict[str, Tensor]
) -> None:
    crops = [(1, 1), (3, 2), (1, 4)]
    given = inputs(crops)
    expected = plain(weights, given["pixel_values"], crops)
    with Encoder.from_pretrained(checkpoint, config=CONFIG) as encoder:
        assert_close(encoder.encode_inputs(**given), expected)
        assert encoder.report().replays == {"vision": {64: 1}}
        assert_close(list(encoder.adapter.model.get_image_features(**given).pooler_output), expected)
        many = inputs([(3, 3)] * 5)
        assert_close(encoder.encode_inputs(**many), plain(weights, many["pixel_values"], [(3, 3)] * 5))
        assert sum(encoder.report().eager["vision"].values()) == 1


def test_transformers_loads_the_published_names_and_writes_them_again(
    checkpoint: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    models.register()
    given = inputs([(2, 1)])
    model = AutoModel.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        found = list(model.get_image_features(**given).pooler_output)
    assert_close(found, plain(weights, given["pixel_values"], [(2, 1)]))
    model.save_pretrained(tmp_path)
    with Encoder.from_pretrained(tmp_path, config=CONFIG) as encoder:
        assert_close(encoder.encode_inputs(**given), found)


def test_the_global_view_may_come_last(checkpoint: Path) -> None:
    given = inputs([(2, 2)])
    with Encoder.from_pretrained(checkpoint, config=CONFIG) as encoder:
        encoder.adapter.model.config.global_view_pos = encoder.adapter.config.global_view_pos = "tail"
        encoder.adapter._index.cache_clear()  # type: ignore[attr-defined]
        (found,) = encoder.encode_inputs(**given)
        (expected,) = encoder.adapter.model.get_image_features(**given).pooler_output
    assert torch.equal(found, expected)
    assert torch.equal(found[4 * 5], encoder.adapter.model.view_seperator)


def test_items_of_a_batch_can_be_joined_and_chosen(checkpoint: Path) -> None:
    with Encoder.from_pretrained(checkpoint, config=CONFIG) as encoder:
        adapter = encoder.adapter
        parts = [adapter.batch(**inputs([crop], seed)) for seed, crop in enumerate([(1, 1), (2, 1), (1, 3)])]
        alone = [encoder.manager.encode(part)[0] for part in parts]
        chosen = encoder.manager.encode(adapter.select(adapter.join(parts), [2, 0]))
    assert_close(chosen, [alone[2], alone[0]])


def test_an_accelerated_model_gives_the_same_features_in_the_same_type(checkpoint: Path) -> None:
    models.register()
    given = inputs([(1, 1), (2, 2)])
    model = AutoModel.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        expected = model.get_image_features(**given)
        with accelerate(model, CONFIG) as handle:
            found = model.get_image_features(**given)
            assert sum(handle.report().replays["vision"].values()) == 1
        assert torch.equal(model.get_image_features(**given).pooler_output[0], expected.pooler_output[0])
    assert type(found.pooler_output) is type(expected.pooler_output)
    assert_close(list(found.pooler_output), list(expected.pooler_output))


# --- counts


@pytest.mark.parametrize("crop", [(1, 1), (3, 3), (2, 4), (9, 1)])
def test_rows_and_tokens_are_the_published_formulas(crop: tuple[int, int]) -> None:
    """`tokenize_with_images` of the reference: h * (w + 1) + 1 + (down * h) * (across * w + 1), h = w = 14."""
    adapter = DeepseekVL2(hf_config(get_preset(FULL)))
    (item,) = adapter.items_of(images_spatial_crop=[list(crop)])
    across, down = crop
    assert item.num_rows == 14 * 15 + 1 + (14 * down) * (14 * across + 1)
    assert item.num_tokens == 196 * (1 + across * down)
    assert item.sizes["vision"].patches == 729 * (1 + across * down)


def test_the_smallest_image_has_421_rows_and_no_budget_is_smaller_than_it() -> None:
    adapter = DeepseekVL2(hf_config(get_preset(FULL)))
    assert adapter.items_of(images_spatial_crop=[[1, 1]])[0].num_rows == 421
    capacities = adapter.capacities("vision", EncoderCudaGraphConfig())
    assert [capacity.sequences for capacity in capacities][:15] == list(range(2, 17))
    with pytest.raises(ConfigError, match="at least 2 tiles of 196 tokens; raise the largest to 392"):
        adapter.capacities("vision", EncoderCudaGraphConfig(max_token_budget=196))


# --- the processor


def test_the_chosen_arrangement_is_that_of_the_published_rule() -> None:
    """The rule written out again: the most shown pixels, then the fewest blank ones, then the first listed."""
    preprocessor, _ = planner(f"preset:{FULL}", EncoderCudaGraphConfig())
    candidates = get_preset(FULL).config["candidate_resolutions"]
    assert len(candidates) == 23
    for width in (1, 100, 384, 385, 768, 1000, 4000):
        for height in (1, 90, 384, 400, 1152, 3000):
            best, most, least = None, -1, 10**12
            for wide, tall in candidates:
                scale = min(wide / width, tall / height)
                shown = min(int(width * scale) * int(height * scale), width * height)
                blank = wide * tall - shown
                if shown > most or (shown == most and blank < least):
                    best, most, least = (wide // 384, tall // 384), shown, blank
            assert preprocessor.processor.crop(width, height) == best


@pytest.mark.parametrize(
    ("size", "crop"), [((384, 384), (1, 1)), ((768, 384), (2, 1)), ((1024, 768), (3, 2)), ((1152, 1152), (3, 3))]
)
def test_sizes_alone_say_what_pixels_say(size: tuple[int, int], crop: tuple[int, int]) -> None:
    preprocessor, _ = planner(f"preset:{FULL}", EncoderCudaGraphConfig())
    image = Image.new("RGB", size)
    item, _ = preprocessor.item(image)
    batch = preprocessor.batch(image)
    assert batch.items == (item,)
    assert batch.crops == (crop,)


def test_tiles_are_cut_out_of_the_padded_image_row_by_row() -> None:
    preprocessor, _ = planner(f"preset:{TINY}", EncoderCudaGraphConfig())
    pixels = np.random.default_rng(0).integers(0, 256, (80, 130, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    (tiles,), ((across, down),) = (batch := preprocessor.batch(image)).tiles, batch.crops
    padded = ImageOps.pad(image, (across * 48, down * 48), color=(127, 127, 127))
    views = [ImageOps.pad(image, (48, 48), color=(127, 127, 127))]
    views += [
        padded.crop((48 * column, 48 * row, 48 * (column + 1), 48 * (row + 1)))
        for row in range(down)
        for column in range(across)
    ]
    for tile, view in zip(tiles, views, strict=True):
        expected = (torch.from_numpy(np.array(view)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
        assert torch.equal(tile, expected)


def test_cropping_can_be_left_out_as_for_three_images_in_a_conversation() -> None:
    from dataclasses import replace

    preprocessor, _ = planner(f"preset:{FULL}", EncoderCudaGraphConfig())
    assert replace(preprocessor.processor, cropping=False).crop(4000, 3000) == (1, 1)


def test_files_become_features_of_as_many_rows_as_planned() -> None:
    image = Image.new("RGB", (100, 60), (200, 10, 10))
    with Encoder.from_preset(TINY, config=CONFIG) as encoder:
        (features,) = encoder.encode([image])
        item, _ = encoder.preprocessor.item(image)
    assert features.shape == (item.num_rows, HIDDEN)


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": None}, "come together; give both"),
        ({"images_spatial_crop": None}, "come together; give both"),
        ({"images_spatial_crop": torch.tensor([[0, 0], [2, 2]])}, r"\(0, 0\); an image has at least 1 column"),
        ({"images_spatial_crop": torch.tensor([[2, 2]])}, r"asks for \(5, 3, 48, 48\)"),
        ({"pixel_values": torch.zeros(7, 3, 50, 50)}, r"has shape \(7, 3, 50, 50\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    adapter = DeepseekVL2(hf_config(get_preset(TINY)))
    with pytest.raises(InputError, match=message):
        adapter.batch(**{**inputs([(1, 1), (2, 2)]), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("vision.blocks.1.attn.qkv.bias"), r"no vision\.blocks\.1\.attn\.qkv\.bias of shape \(192,\)"),
        (lambda t: t.pop("view_seperator"), r"no view_seperator of shape \(32,\)"),
        (
            lambda t: t.update({"vision.blocks.2.norm1.bias": torch.ones(64)}),
            r"vision\.blocks\.2\.norm1\.bias in model",
        ),
        (
            lambda t: t.update({"vision.pos_embed": torch.ones(1, 16, 64)}),
            r"vision\.pos_embed in .* has shape \(1, 16, 64\); .* has \(1, 9, 64\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    change: Any, message: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    tensors = dict(weights)
    change(tensors)
    write_checkpoint(tmp_path, published_config(), tensors)
    with pytest.raises(CheckpointError, match=message):
        Encoder.from_pretrained(tmp_path, config=CONFIG)


def test_other_projectors_and_tile_tags_are_refused() -> None:
    config = hf_config(get_preset(TINY))
    config.tile_tag = "1D"
    with pytest.raises(UnsupportedModelError, match="tile_tag='1D'"):
        DeepseekVL2(config)
    models.register()
    other = AutoConfig.for_model("deepseek_vl_v2", projector_config={"projector_type": "linear"})
    with pytest.raises(UnsupportedModelError, match="projector_type='linear'"):
        AutoModel.from_config(other)


def test_the_architecture_says_which_model_of_the_same_type_it_is() -> None:
    models.register()
    assert AutoConfig.for_model("deepseek_vl_v2").model_type == "deepseek_vl_v2"
    assert (
        AutoConfig.for_model("deepseek_vl_v2", architectures=["DeepseekVLV2ForCausalLM"]).model_type == "deepseek_vl_v2"
    )
    assert AutoConfig.for_model("deepseek_vl_v2", architectures=["DeepseekOCRForCausalLM"]).model_type == "deepseek_ocr"
    with pytest.raises(ValueError, match="architecture DeepseekOCR9ForCausalLM"):
        AutoConfig.for_model("deepseek_vl_v2", architectures=["DeepseekOCR9ForCausalLM"])
