"""DeepSeek-OCR and DeepSeek-OCR-2: published checkpoints, the order of rows, SAM's pixels, the choice of queries."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import interpolate, layer_norm, linear, scaled_dot_product_attention
from transformers import AutoModelForImageTextToText

from onereplay.acceleration import accelerate
from onereplay.checking import FP32_TOLERANCE
from onereplay.config import EncoderCudaGraphConfig
from onereplay.encoder import Encoder
from onereplay.errors import CheckpointError, InputError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.presets import get_preset, hf_config

CONFIG = EncoderCudaGraphConfig(token_budgets=(64, 432))
"""Traced on first use."""
NONE = Grid(1, 0, 0)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """The rule of `checking` for float32."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)


# ------------------------------------------------------------------ DeepSeek-OCR: a checkpoint as published


def published(seed: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and weights of a tiny checkpoint under the names and with the shapes of the published one."""
    config = copy.deepcopy(dict(get_preset("deepseek_ocr@tiny").config))
    config["model_type"] = "deepseek_vl_v2"
    towers = config["vision_config"]["width"]
    sam, clip = towers["sam_vit_b"], towers["clip-l-14-224"]
    width, out, hidden = sam["width"], sam["out_channels"], config["projector_config"]["n_embed"]
    shapes: dict[str, tuple[int, ...]] = {
        "image_newline": (hidden,),
        "view_seperator": (hidden,),
        "projector.layers.weight": (hidden, 2 * clip["width"]),
        "projector.layers.bias": (hidden,),
        "sam_model.patch_embed.proj.weight": (width, 3, 16, 16),
        "sam_model.patch_embed.proj.bias": (width,),
        "sam_model.pos_embed": (1, 16, 16, width),
        "sam_model.neck.0.weight": (out, width, 1, 1),
        "sam_model.neck.2.weight": (out, out, 3, 3),
        "sam_model.net_2.weight": (sam["downsample_channels"][0], out, 3, 3),
        "sam_model.net_3.weight": (sam["downsample_channels"][1], sam["downsample_channels"][0], 3, 3),
        "vision_model.embeddings.class_embedding": (clip["width"],),
        "vision_model.embeddings.patch_embedding.weight": (clip["width"], 3, 14, 14),
        "vision_model.embeddings.position_embedding.weight": (17, clip["width"]),
        "layers.0.mlp.gate.weight": (4, hidden),
        "norm.weight": (hidden,),
    }
    for name in ("neck.1", "neck.3"):
        shapes |= {f"sam_model.{name}.{leaf}": (out,) for leaf in ("weight", "bias")}
    for index in range(sam["layers"]):
        block = f"sam_model.blocks.{index}."
        side = 16 if index in sam["global_attn_indexes"] else sam["window_size"]
        for axis in "hw":
            shapes[f"{block}attn.rel_pos_{axis}"] = (2 * side - 1, width // sam["heads"])
        _linear(shapes, block, {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.lin1": (4, 1), "mlp.lin2": (1, 4)}, width)
        shapes |= {f"{block}{norm}.{leaf}": (width,) for norm in ("norm1", "norm2") for leaf in ("weight", "bias")}
    width, inner = clip["width"], clip["ffn_hidden_size"] // clip["width"]
    for index in range(clip["layers"]):
        block = f"vision_model.transformer.layers.{index}."
        parts = {
            "self_attn.qkv_proj": (3, 1),
            "self_attn.out_proj": (1, 1),
            "mlp.fc1": (inner, 1),
            "mlp.fc2": (1, inner),
        }
        _linear(shapes, block, parts, width)
        norms = ("layer_norm1", "layer_norm2")
        shapes |= {f"{block}{norm}.{leaf}": (width,) for norm in norms for leaf in ("weight", "bias")}
    shapes |= {f"vision_model.pre_layrnorm.{leaf}": (width,) for leaf in ("weight", "bias")}
    generator = torch.Generator().manual_seed(seed)
    weights = {f"model.{name}": 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return config, {**weights, "lm_head.weight": torch.zeros(8, hidden)}


def _linear(shapes: dict[str, tuple[int, ...]], block: str, parts: Mapping[str, tuple[int, int]], width: int) -> None:
    for name, (rows, columns) in parts.items():
        shapes[f"{block}{name}.weight"] = (rows * width, columns * width)
        shapes[f"{block}{name}.bias"] = (rows * width,)


def write(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """In three shards, dealt out by turns."""
    names = sorted(weights)
    index = {name: f"model-{place % 3:05}-of-00003.safetensors" for place, name in enumerate(names)}
    for file in sorted(set(index.values())):
        save_file({name: weights[name] for name in names if index[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def plain(weights: Mapping[str, Tensor], config: Mapping[str, Any], pixels: Tensor) -> Tensor:
    """One view `(3, side, side)` through the towers, from published weights: one patch grid, loops over windows."""
    w = {name.removeprefix("model."): value for name, value in weights.items()}
    sam, clip = (config["vision_config"]["width"][name] for name in ("sam_vit_b", "clip-l-14-224"))
    x = torch.nn.functional.conv2d(
        pixels[None], w["sam_model.patch_embed.proj.weight"], w["sam_model.patch_embed.proj.bias"], stride=16
    )[0].permute(1, 2, 0)
    side = len(x)
    x = x + _resized(w["sam_model.pos_embed"][0], side)
    for index in range(sam["layers"]):
        b = f"sam_model.blocks.{index}."
        y = layer_norm(x, x.shape[-1:], w[f"{b}norm1.weight"], w[f"{b}norm1.bias"], 1e-6)
        window = side if index in sam["global_attn_indexes"] else sam["window_size"]
        whole = -(-side // window) * window
        padded = torch.zeros(whole, whole, y.shape[-1])
        padded[:side, :side] = y
        for top in range(0, whole, window):
            for left in range(0, whole, window):
                part = padded[top : top + window, left : left + window]
                part.copy_(_sam_attention(part.clone(), w, f"{b}attn.", sam["heads"]))
        x = x + padded[:side, :side]
        y = layer_norm(x, x.shape[-1:], w[f"{b}norm2.weight"], w[f"{b}norm2.bias"], 1e-6)
        y = torch.nn.functional.gelu(linear(y, w[f"{b}mlp.lin1.weight"], w[f"{b}mlp.lin1.bias"]))
        x = x + linear(y, w[f"{b}mlp.lin2.weight"], w[f"{b}mlp.lin2.bias"])
    x = x.permute(2, 0, 1)[None]
    for conv, norm, padding in (("0", "1", 0), ("2", "3", 1)):
        x = torch.nn.functional.conv2d(x, w[f"sam_model.neck.{conv}.weight"], padding=padding).permute(0, 2, 3, 1)
        weight, bias = (w[f"sam_model.neck.{norm}.{leaf}"] for leaf in ("weight", "bias"))
        x = layer_norm(x, x.shape[-1:], weight, bias, 1e-6).permute(0, 3, 1, 2)
    for conv in ("net_2", "net_3"):
        x = torch.nn.functional.conv2d(x, w[f"sam_model.{conv}.weight"], stride=2, padding=1)
    features = x[0].flatten(1).T
    table = w["vision_model.embeddings.position_embedding.weight"]
    places = _resized(table[1:].view(4, 4, -1), x.shape[-1]).flatten(0, 1)
    first = w["vision_model.embeddings.class_embedding"] + table[0]
    h = torch.cat([first[None], features + places])
    v = "vision_model."
    h = layer_norm(h, h.shape[-1:], w[f"{v}pre_layrnorm.weight"], w[f"{v}pre_layrnorm.bias"], 1e-5)
    for index in range(clip["layers"]):
        b = f"{v}transformer.layers.{index}."
        y = layer_norm(h, h.shape[-1:], w[f"{b}layer_norm1.weight"], w[f"{b}layer_norm1.bias"], 1e-5)
        qkv = linear(y, w[f"{b}self_attn.qkv_proj.weight"], w[f"{b}self_attn.qkv_proj.bias"])
        q, k, u = (part.view(len(h), clip["heads"], -1).transpose(0, 1) for part in qkv.chunk(3, dim=-1))
        mixed = scaled_dot_product_attention(q, k, u).transpose(0, 1).flatten(1)
        h = h + linear(mixed, w[f"{b}self_attn.out_proj.weight"], w[f"{b}self_attn.out_proj.bias"])
        y = layer_norm(h, h.shape[-1:], w[f"{b}layer_norm2.weight"], w[f"{b}layer_norm2.bias"], 1e-5)
        y = linear(y, w[f"{b}mlp.fc1.weight"], w[f"{b}mlp.fc1.bias"])
        h = h + linear(y * torch.sigmoid(1.702 * y), w[f"{b}mlp.fc2.weight"], w[f"{b}mlp.fc2.bias"])
    both = torch.cat([h[1:], features], dim=-1)
    return linear(both, w["projector.layers.weight"], w["projector.layers.bias"])


def _resized(table: Tensor, side: int) -> Tensor:
    if len(table) == side:
        return table
    square = table.permute(2, 0, 1)[None]
    return interpolate(square, size=(side, side), mode="bicubic", antialias=True)[0].permute(1, 2, 0)


def _sam_attention(x: Tensor, w: Mapping[str, Tensor], name: str, heads: int) -> Tensor:
    side, _, width = x.shape
    qkv = linear(x.reshape(-1, width), w[f"{name}qkv.weight"], w[f"{name}qkv.bias"])
    q, k, v = qkv.view(side * side, 3, heads, -1).permute(1, 2, 0, 3)
    tables = []
    for axis in "hw":
        table = w[f"{name}rel_pos_{axis}"]
        if len(table) != 2 * side - 1:
            table = interpolate(table.T[None], size=2 * side - 1, mode="linear")[0].T
        tables.append(table)
    rows, columns = torch.arange(side * side) // side, torch.arange(side * side) % side
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    for table, places in zip(tables, (rows, columns), strict=True):
        scores = scores + (q[:, :, None] * table[places[:, None] - places + side - 1]).sum(-1)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return linear(mixed, w[f"{name}proj.weight"], w[f"{name}proj.bias"]).view(side, side, width)


def test_a_published_checkpoint_gives_the_rows_of_a_plain_implementation_in_published_order(tmp_path: Path) -> None:
    """From weights to rows: nothing is shared with the encoder but PyTorch. 1e-5, the rule of `checking`."""
    config, weights = published()
    write(tmp_path, config, weights)
    with Encoder.from_pretrained(str(tmp_path), config=CONFIG, device="cpu", dtype=torch.float32) as encoder:
        assert encoder.adapter.model_type == "deepseek_ocr"
        grids = [Grid(1, 2, 3), NONE]
        inputs = encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(5))
        found = encoder.encode_inputs(**inputs)
    newline, separator = weights["model.image_newline"], weights["model.view_seperator"]
    whole = [plain(weights, config, pixels).view(4, 4, -1) for pixels in inputs["pixel_values"]]
    local = [plain(weights, config, pixels).view(3, 3, -1) for pixels in inputs["pixel_values_local"]]
    expected = []
    for down in range(2):
        for row in range(3):
            expected += [rows for across in range(3) for rows in local[3 * down + across][row]] + [newline]
    for row in range(4):
        expected += [*whole[0][row], newline]
    assert_close(found[0], torch.stack([*expected, separator]))
    alone = [rows for row in range(4) for rows in (*whole[1][row], newline)]
    assert_close(found[1], torch.stack([*alone, separator]))


def test_what_was_saved_again_loads_too(tmp_path: Path) -> None:
    config, weights = published()
    (tmp_path / "first").mkdir()
    write(tmp_path / "first", config, weights)
    options: dict[str, Any] = {"config": CONFIG, "device": "cpu", "dtype": torch.float32}
    with Encoder.from_pretrained(str(tmp_path / "first"), **options) as encoder:
        inputs = encoder.adapter.example_inputs([NONE], torch.Generator().manual_seed(5))
        expected = encoder.encode_inputs(**inputs)[0]
        encoder.adapter.model.save_pretrained(tmp_path / "second")
    with Encoder.from_pretrained(str(tmp_path / "second"), **options) as encoder:
        assert encoder.adapter.model_type == "deepseek_ocr"
        assert torch.equal(encoder.encode_inputs(**inputs)[0], expected)


def test_a_missing_an_extra_and_a_misshapen_weight_are_named(tmp_path: Path) -> None:
    config, weights = published()
    name = "model.vision_model.transformer.layers.1.mlp.fc2.bias"
    cases = {
        "missing": ({key: value for key, value in weights.items() if key != name}, "encoder.layers.1.mlp.fc2.bias"),
        "extra": ({**weights, "model.sam_model.blocks.0.attn.scale": torch.zeros(1)}, "attn.scale in .* has no place"),
        "shape": ({**weights, name: torch.zeros(65)}, rf"{name} in .* has shape \(65,\)"),
    }
    for case, (given, words) in cases.items():
        (tmp_path / case).mkdir()
        write(tmp_path / case, config, given)
        with pytest.raises(CheckpointError, match=words):
            Encoder.from_pretrained(str(tmp_path / case), device="cpu", config=CONFIG)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_local_patches": [6]}, "local tiles need patches_grid"),
        ({"num_local_patches": [6], "patches_grid": [[2, 2]]}, "disagree"),
        ({"num_local_patches": [6], "patches_grid": [[3, 2], [1, 1]]}, "disagree"),
        ({"patches_grid": [[3, 2, 1]]}, "patches_grid must have 2 columns"),
    ],
)
def test_how_tiles_lie_must_be_said_and_agree(sizes: dict[str, Any], words: str) -> None:
    with Encoder.from_preset("deepseek_ocr@tiny", config=CONFIG) as encoder, pytest.raises(InputError, match=words):
        encoder.adapter.items_of(**sizes)


def test_bfloat16_takes_float32_pixels() -> None:
    """SAM converts nothing; the encoder's buffers have the model's type."""
    with Encoder.from_preset("deepseek_ocr@tiny", config=CONFIG, dtype=torch.bfloat16) as encoder:
        inputs = encoder.adapter.example_inputs([NONE], torch.Generator().manual_seed(0))
        assert inputs["pixel_values"].dtype == torch.float32
        (rows,) = encoder.encode_inputs(**inputs)
        assert rows.dtype == torch.bfloat16
        assert rows.isfinite().all()


def test_weights_changed_in_place_reach_the_next_replay() -> None:
    """Tables of positions are resized in the graph, not kept from its capture."""
    with Encoder.from_preset("deepseek_ocr@tiny", config=CONFIG) as encoder:
        model = encoder.adapter.model
        inputs = encoder.adapter.example_inputs([Grid(1, 1, 2)], torch.Generator().manual_seed(0))
        (before,) = encoder.encode_inputs(**inputs)
        sam = model.vision_tower.sam_encoder
        for table in (sam.pos_embed, sam.layers[1].attn.rel_pos_h, model.image_newline):
            table.data.mul_(-1)
        (after,) = encoder.encode_inputs(**inputs)
        assert (before - after).abs().max() > 0.01
        with torch.no_grad():
            assert_close(after, model.get_image_features(**inputs).pooler_output[0])


# ------------------------------------------------------------------ DeepSeek-OCR-2


@pytest.fixture(scope="module")
def whole() -> Any:
    model = AutoModelForImageTextToText.from_config(hf_config(get_preset("deepseek_ocr2@tiny"))).eval()
    random_weights_(model, tuple(name for name, _ in model.named_children()), 0)
    return model


def test_an_accelerated_model_gives_features_of_the_stock_type(whole: Any) -> None:
    model = copy.deepcopy(whole)
    with accelerate(model, CONFIG) as handle, torch.no_grad():
        inputs = handle.adapter.example_inputs([Grid(1, 1, 2), NONE], torch.Generator().manual_seed(1))
        found, expected = (each.get_image_features(**inputs).pooler_output for each in (model, whole))
        assert handle.report().replays == {"global": {432: 1}, "local": {432: 1}}
    assert type(found) is type(expected) is list
    for rows, plain_rows in zip(found, expected, strict=True):
        assert_close(rows, plain_rows)


def test_a_saved_checkpoint_is_what_transformers_loads(whole: Any, tmp_path: Path) -> None:
    whole.save_pretrained(tmp_path)
    with Encoder.from_pretrained(str(tmp_path), config=CONFIG, device="cpu", dtype=torch.float32) as encoder:
        inputs = encoder.adapter.example_inputs([Grid(1, 1, 2), NONE], torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = whole.get_image_features(**inputs).pooler_output
        for rows, plain_rows in zip(encoder.encode_inputs(**inputs), expected, strict=True):
            assert_close(rows, plain_rows)


def test_a_tile_of_more_features_takes_the_larger_table_of_queries() -> None:
    """13x13 features of a tile of 832 pixels; one encoder layer and one head of SAM are enough to tell."""
    preset = get_preset("deepseek_ocr2@tiny")
    preset.config["vision_config"]["sam_config"].update(image_size=832, global_attn_indexes=[], num_hidden_layers=1)
    model = AutoModelForImageTextToText.from_config(hf_config(preset)).eval()
    random_weights_(model, tuple(name for name, _ in model.named_children()), 0)
    with Encoder(model, CONFIG) as encoder:
        assert [encoder.adapter.unit(path) for path in ("global", "local")] == [256, 144]
        inputs = encoder.adapter.example_inputs([Grid(1, 1, 1)], torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = model.model.get_image_features(**inputs).pooler_output[0]
        assert_close(encoder.encode_inputs(**inputs)[0], expected)
