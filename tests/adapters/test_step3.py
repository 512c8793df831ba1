"""Step-3.7, Step3-VL-10B and Step3: published checkpoints, fused attention weights, four class rows, norms behind."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, layer_norm, linear, scaled_dot_product_attention
from transformers import AutoModelForImageTextToText

from onereplay.acceleration import accelerate
from onereplay.checking import FP32_TOLERANCE
from onereplay.config import EncoderCudaGraphConfig
from onereplay.encoder import Encoder
from onereplay.errors import CheckpointError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.presets import get_preset, hf_config

CONFIG = EncoderCudaGraphConfig(token_budgets=(64,))
"""Traced on first use."""
OPTIONS: dict[str, Any] = {"config": CONFIG, "device": "cpu", "dtype": torch.float32}
GRIDS = [Grid(1, 1, 2), Grid(1, 0, 0), Grid(1, 1, 3)]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """The rule of `checking` for float32."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)


def write(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """In three shards, dealt out by turns."""
    directory.mkdir(exist_ok=True)
    names = sorted(weights)
    index = {name: f"model-{place % 3:05}-of-00003.safetensors" for place, name in enumerate(names)}
    for file in sorted(set(index.values())):
        save_file({name: weights[name] for name in names if index[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


# ------------------------------------------------------------------ Step-3.7 and Step3-VL-10B


@pytest.fixture(scope="module")
def whole() -> Any:
    model = AutoModelForImageTextToText.from_config(hf_config(get_preset("step3p7@tiny"))).eval()
    random_weights_(model, tuple(name for name, _ in model.named_children()), 0)
    return model


def published(model: Any) -> dict[str, Tensor]:
    """The vision weights of a whole model under the published names: qkv in one matrix, rotary pairs side by side."""
    heads = model.config.vision_config.num_attention_heads
    names = {
        "embeddings.patch_embedding.weight": "conv1.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "pre_layernorm": "ln_pre",
        "layers": "transformer.resblocks",
        "lambda_1": "ls_1.gamma",
        "lambda_2": "ls_2.gamma",
        "fc1": "c_fc",
        "fc2": "c_proj",
        "self_attn": "attn",
        "layernorm_before": "ln_1",
        "layernorm_after": "ln_2",
        "downsampler": "vit_downsampler",
    }
    weights = {"vit_large_projector.weight": model.model.multi_modal_projector.weight.detach().clone()}
    fused: dict[str, dict[str, Tensor]] = {}
    for name, value in model.model.vision_model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        head, _, leaf = name.rpartition(".")
        stem, _, part = head.rpartition(".")
        if part in ("q_proj", "k_proj", "v_proj"):
            pairs = value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
            fused.setdefault(f"{stem}.in_proj_{leaf}", {})[part] = value if part == "v_proj" else pairs
        else:
            weights[f"vision_model.{name}"] = value.clone()
    for name, parts in fused.items():
        weights[f"vision_model.{name}"] = torch.cat([parts[part] for part in ("q_proj", "k_proj", "v_proj")])
    return {**weights, "model.norm.weight": torch.zeros(32), "lm_head.weight": torch.zeros(8, 32)}


def step3p7_config() -> dict[str, Any]:
    return copy.deepcopy(dict(get_preset("step3p7@tiny").config))


def step_robotics_config() -> dict[str, Any]:
    """The vision configuration under the names of the checkpoint's own code."""
    config = copy.deepcopy(dict(get_preset("step3_vl-10b@tiny").config))
    vision = config["vision_config"]
    for ours, theirs in {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}.items():
        vision[theirs] = vision.pop(ours)
    config["vision_config"] = {"model_type": "perception_encoder", **vision}
    config["text_config"] = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "rope_theta": 1e6}
    return config


@pytest.mark.parametrize("config", [step3p7_config(), step_robotics_config()], ids=lambda config: config["model_type"])
def test_a_published_checkpoint_with_fused_attention_gives_the_stock_features(
    config: dict[str, Any], whole: Any, tmp_path: Path
) -> None:
    write(tmp_path, config, published(whole))
    with Encoder.from_pretrained(str(tmp_path), **OPTIONS) as encoder:
        assert encoder.adapter.model_type == config["model_type"]
        inputs = encoder.adapter.example_inputs(GRIDS, torch.Generator().manual_seed(2))
        found = encoder.encode_inputs(**inputs, patch_newline_masks=[[False]])
    with torch.no_grad():
        expected = whole.get_image_features(**inputs).pooler_output
    for rows, plain in zip(found, expected, strict=True):
        assert_close(rows, plain)


def test_a_misshapen_fused_weight_is_named(whole: Any, tmp_path: Path) -> None:
    name = "vision_model.transformer.resblocks.1.attn.in_proj_weight"
    for case, shape in {"even": (96, 64), "odd": (193, 64), "narrow": (192, 63)}.items():
        weights = {**published(whole), name: torch.zeros(shape)}
        with pytest.raises(CheckpointError, match=rf"{name} in .* has shape \({shape[0]}, {shape[1]}\)"):
            Encoder.from_pretrained(str(write(tmp_path / case, step3p7_config(), weights)), **OPTIONS)


def test_half_of_a_fused_weight_missing_is_named(whole: Any, tmp_path: Path) -> None:
    weights = published(whole)
    del weights["vision_model.transformer.resblocks.1.attn.in_proj_bias"]
    with pytest.raises(CheckpointError, match=r"has no vision_model.layers.1.self_attn.._proj.bias of shape \(64,\)"):
        Encoder.from_pretrained(str(write(tmp_path, step3p7_config(), weights)), **OPTIONS)


def test_a_saved_checkpoint_is_what_transformers_loads(whole: Any, tmp_path: Path) -> None:
    whole.save_pretrained(tmp_path)
    with Encoder.from_pretrained(str(tmp_path), **OPTIONS) as encoder:
        inputs = encoder.adapter.example_inputs(GRIDS, torch.Generator().manual_seed(2))
        with torch.no_grad():
            expected = whole.get_image_features(**inputs).pooler_output
        for rows, plain in zip(encoder.encode_inputs(**inputs), expected, strict=True):
            assert_close(rows, plain)


def test_an_accelerated_model_gives_features_of_the_stock_type(whole: Any) -> None:
    model = copy.deepcopy(whole)
    with accelerate(model, CONFIG) as handle, torch.no_grad():
        inputs = handle.adapter.example_inputs(GRIDS, torch.Generator().manual_seed(1))
        found, expected = (each.get_image_features(**inputs).pooler_output for each in (model, whole))
        assert handle.report().replays == {"global": {64: 1}, "local": {72: 1}}
    assert type(found) is type(expected) is list
    for rows, plain in zip(found, expected, strict=True):
        assert_close(rows, plain)


# ------------------------------------------------------------------ Step3


def step3_checkpoint(seed: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and weights of a tiny checkpoint under the names and with the shapes of the published one."""
    config = copy.deepcopy(dict(get_preset("step3@tiny").config))
    vision = config["vision_config"]
    config["text_config"] = {"hidden_size": 32, "num_attention_heads": 4, "share_q_dim": 8, "rope_scaling": None}
    width, inner, out = (vision[name] for name in ("hidden_size", "intermediate_size", "output_hidden_size"))
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.class_embedding": (1, width),
        "vision_model.embeddings.patch_embedding.weight": (width, 3, 14, 14),
        "vision_model.embeddings.patch_embedding.bias": (width,),
        "vision_model.embeddings.position_embedding.weight": (13 * 13 + 1, width),
        "vit_downsampler.weight": (out, width, 2, 2),
        "vit_downsampler.bias": (out,),
        "vit_downsampler2.weight": (2 * out, out, 3, 3),
        "vit_downsampler2.bias": (2 * out,),
        "vit_large_projector.weight": (32, 2 * out),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.embed_tokens.weight": (8, 32),
    }
    for index in range(vision["num_hidden_layers"]):
        layer = f"vision_model.transformer.layers.{index}."
        for name, (rows, columns) in {
            "self_attn.qkv_proj": (3 * width, width),
            "self_attn.out_proj": (width, width),
            "mlp.fc1": (inner, width),
            "mlp.fc2": (width, inner),
        }.items():
            shapes |= {f"{layer}{name}.weight": (rows, columns), f"{layer}{name}.bias": (rows,)}
        for name in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{layer}{name}.weight": (width,), f"{layer}{name}.bias": (width,)}
    generator = torch.Generator().manual_seed(seed)
    return config, {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def step3_plain(w: Mapping[str, Tensor], config: Mapping[str, Any], pixels: Tensor) -> Tensor:
    """One view `(3, side, side)`, from published weights."""
    v, heads = "vision_model.", config["vision_config"]["num_attention_heads"]
    weight, bias = (w[f"{v}embeddings.patch_embedding.{leaf}"] for leaf in ("weight", "bias"))
    grid = conv2d(pixels[None], weight, bias, stride=14)
    side = grid.shape[-1]
    table = w[f"{v}embeddings.position_embedding.weight"]
    places = table[1:].view(13, 13, -1).permute(2, 0, 1)[None]
    if side != 13:
        places = interpolate(places, size=(side, side), mode="bicubic", antialias=True)
    first = w[f"{v}embeddings.class_embedding"] + table[:1]
    h = torch.cat([first, first, first, first, (grid + places)[0].flatten(1).T])
    for index in range(config["vision_config"]["num_hidden_layers"]):
        b = f"{v}transformer.layers.{index}."
        qkv = linear(h, w[f"{b}self_attn.qkv_proj.weight"], w[f"{b}self_attn.qkv_proj.bias"])
        q, k, u = (part.view(len(h), heads, -1).transpose(0, 1) for part in qkv.chunk(3, dim=-1))
        mixed = scaled_dot_product_attention(q, k, u).transpose(0, 1).flatten(1)
        y = linear(mixed, w[f"{b}self_attn.out_proj.weight"], w[f"{b}self_attn.out_proj.bias"])
        h = h + layer_norm(y, y.shape[-1:], w[f"{b}layer_norm1.weight"], w[f"{b}layer_norm1.bias"], 1e-5)
        y = linear(h, w[f"{b}mlp.fc1.weight"], w[f"{b}mlp.fc1.bias"])
        y = linear(y * torch.sigmoid(1.702 * y), w[f"{b}mlp.fc2.weight"], w[f"{b}mlp.fc2.bias"])
        h = h + layer_norm(y, y.shape[-1:], w[f"{b}layer_norm2.weight"], w[f"{b}layer_norm2.bias"], 1e-5)
    square = h[4:].T.reshape(1, -1, side, side)
    square = conv2d(square, w["vit_downsampler.weight"], w["vit_downsampler.bias"], stride=2)
    square = conv2d(square, w["vit_downsampler2.weight"], w["vit_downsampler2.bias"], stride=2, padding=1)
    return linear(square[0].flatten(1).T, w["vit_large_projector.weight"])


def test_a_published_step3_gives_the_rows_of_a_plain_implementation(tmp_path: Path) -> None:
    """Local tiles first, under the names of the published processor too."""
    config, weights = step3_checkpoint()
    with Encoder.from_pretrained(str(write(tmp_path, config, weights)), **OPTIONS) as encoder:
        assert encoder.adapter.model_type == "step3_vl"
        inputs = encoder.adapter.example_inputs(GRIDS, torch.Generator().manual_seed(2))
        found = encoder.encode_inputs(**inputs)
        again = encoder.encode_inputs(
            pixel_values=inputs["pixel_values"],
            patch_pixel_values=inputs["pixel_values_local"],
            num_patches=inputs["num_local_patches"],
        )
    whole = [step3_plain(weights, config, pixels) for pixels in inputs["pixel_values"]]
    local = [step3_plain(weights, config, pixels) for pixels in inputs["pixel_values_local"]]
    assert len(whole[0]) == 9
    assert len(local[0]) == 4
    expected = [[*local[:2], whole[0]], [whole[1]], [*local[2:], whole[2]]]
    for rows, other, parts in zip(found, again, expected, strict=True):
        assert_close(rows, torch.cat(parts))
        assert torch.equal(rows, other)


def test_a_missing_an_extra_and_a_misshapen_weight_of_step3_are_named(tmp_path: Path) -> None:
    config, weights = step3_checkpoint()
    name = "vision_model.transformer.layers.1.mlp.fc2.bias"
    cases = {
        "missing": ({key: value for key, value in weights.items() if key != name}, f"has no {name}"),
        "extra": ({**weights, "vision_model.post_layernorm.weight": torch.zeros(1)}, "post_layernorm.* has no place"),
        "shape": ({**weights, name: torch.zeros(65)}, rf"{name} in .* has shape \(65,\)"),
    }
    for case, (given, words) in cases.items():
        with pytest.raises(CheckpointError, match=words):
            Encoder.from_pretrained(str(write(tmp_path / case, config, given)), **OPTIONS)
