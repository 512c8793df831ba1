"""Kimi-K2.5: clips, their mean over frames, resampled positions, and videos of several clips."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import interpolate, layer_norm, linear, scaled_dot_product_attention
from transformers import AutoModelForImageTextToText

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_class
from onereplay.checking import FP32_TOLERANCE
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.encoder import Encoder
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.media import load_video
from onereplay.preprocess import grid_of, load_image_processor, preprocess_images, preprocess_video
from onereplay.presets import get_preset, hf_config

PRESET = "kimi_k25@tiny"


@pytest.fixture(scope="module")
def kimi() -> Iterator[Encoder]:
    config = EncoderCudaGraphConfig(token_budgets=(32, 64, 128), backend="traced", max_items_per_batch=8)
    with Encoder.from_preset(PRESET, config=config) as made:
        yield made


def close(found: Tensor, expected: Tensor) -> bool:
    """The fp32 rule of `onereplay.checking`: the same sums in another order."""
    return bool((found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1))


def inputs_of(encoder: Encoder, grids: list[Grid], seed: int = 0) -> dict[str, Tensor]:
    return encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ a plain tower for one clip


def rotated(rows: Tensor, angles: Tensor) -> Tensor:
    """Each pair (i, i + half) of a head turned by its angle: rows `(P, heads, D)`, angles `(P, D // 2)`."""
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def plain_clip(model: Any, pixels: Tensor, grid: Grid) -> Tensor:
    """The whole encoder on one clip, from the published description: no packing, dense attention."""
    tower, (t, h, w) = model.vision_tower, grid
    positions = tower.patch_embed.pos_emb
    hidden = tower.patch_embed.proj(pixels).flatten(1)
    width = hidden.shape[1]
    table = positions.position_embeddings.permute(2, 0, 1).unsqueeze(0)
    learned = interpolate(table, (h, w), mode="bicubic", align_corners=False)[0].permute(1, 2, 0).reshape(h * w, width)
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    waves = torch.arange(t).unsqueeze(1) * frequencies
    sinusoids = torch.cat([waves.sin(), waves.cos()], dim=1) if t > 1 else torch.zeros(1, width)
    hidden = hidden + (learned + sinusoids.unsqueeze(1)).flatten(0, 1)

    heads = tower.config.num_attention_heads
    size = width // heads
    rates = 10000.0 ** (-torch.arange(0, size // 2, 2) / (size // 2))
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    angles = torch.stack([columns.reshape(-1, 1) * rates, rows.reshape(-1, 1) * rates], dim=-1).flatten(1).repeat(t, 1)
    for layer in tower.layers:
        attention, normed = layer.attn, layer.norm1(hidden)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (each(normed).view(-1, heads, size) for each in projections)
        q, k, v = (rows.transpose(0, 1) for rows in (rotated(q, angles), rotated(k, angles), v))
        mixed = scaled_dot_product_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))[0]
        hidden = hidden + attention.proj(mixed.transpose(0, 1).flatten(1))
        hidden = hidden + layer.mlp(layer.norm2(hidden))
    last = tower.final_layernorm
    hidden = layer_norm(hidden, (width,), last.weight, last.bias, 1e-5).view(t, h, w, width)

    projector, tokens = model.mm_projector, []
    for row in range(0, h, 2):
        for column in range(0, w, 2):
            square = hidden[:, row : row + 2, column : column + 2].mean(0)
            tokens.append(projector.pre_norm(square).flatten())
    inner = torch.nn.functional.gelu(linear(torch.stack(tokens), projector.in_proj.weight, projector.in_proj.bias))
    return projector.out_proj(inner)  # type: ignore[no-any-return]


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_images_and_clips_of_one_batch_are_those_of_a_plain_tower(kimi: Encoder, frames: int) -> None:
    """The table of 8x8 is shrunk, kept and stretched."""
    grids = [Grid(1, 4, 6), Grid(1, 8, 8), Grid(frames, 2, 10), Grid(frames, 4, 4)]
    inputs = inputs_of(kimi, grids)
    found = kimi.encode_inputs(**inputs)
    pixels = torch.cat([rows for name, rows in inputs.items() if name.startswith("pixel_values")])
    model = kimi.adapter.model
    with torch.no_grad():
        parts = pixels.split([grid.num_patches for grid in grids])
        expected = [plain_clip(model, part, grid) for part, grid in zip(parts, grids, strict=True)]
    assert [len(rows) for rows in found] == [6, 16, 5, 4]
    assert all(close(rows, other) for rows, other in zip(found, expected, strict=True))


# ------------------------------------------------------------------ clips


def test_tokens_do_not_depend_on_frames_and_the_budget_holds_the_patches(kimi: Encoder) -> None:
    plans = [kimi.manager.plan(kimi.adapter.batch(**inputs_of(kimi, [Grid(t, 8, 16)]))) for t in (1, 2, 3, 4)]
    assert {kimi.adapter.items_of(video_grid_thw=[[t, 8, 16]])[0].num_tokens for t in (1, 2, 3, 4)} == {32}
    steps = [plan.steps["vision"] for plan in plans]
    assert [step.capacity.tokens for step in steps if isinstance(step, Replay)] == [32, 64, 128, 128]


def test_a_clip_whose_patches_fit_no_budget_is_one_eager_forward(kimi: Encoder) -> None:
    inputs = inputs_of(kimi, [Grid(4, 12, 12)])
    step = kimi.manager.plan(kimi.adapter.batch(**inputs)).steps["vision"]
    assert isinstance(step, Eager)
    assert step.reason is Reason.OVER_LARGEST_BUDGET
    (found,) = kimi.encode_inputs(**inputs)
    with torch.no_grad():
        assert close(found, plain_clip(kimi.adapter.model, inputs["pixel_values_videos"], Grid(4, 12, 12)))


def test_a_clip_of_five_frames_is_refused_with_the_way_out(kimi: Encoder) -> None:
    with pytest.raises(InputError, match=r"\(5, 4, 4\) has 5 frames, the tower takes up to 4; cut the video into"):
        kimi.encode_inputs(**inputs_of(kimi, [Grid(5, 4, 4)]))
    with pytest.raises(InputError, match="has 5 frames"):
        kimi.adapter.items_of(image_grid_thw=[[5, 4, 4]])


def test_a_video_of_several_clips_is_one_item_with_the_rows_of_its_clips(kimi: Encoder) -> None:
    grids = [Grid(1, 4, 4), Grid(4, 4, 4), Grid(4, 4, 4), Grid(2, 4, 4), Grid(3, 2, 2)]
    inputs = inputs_of(kimi, grids)
    image, *clips = kimi.encode_inputs(**inputs)
    found = kimi.encode_inputs(**inputs, num_chunks_per_video=torch.tensor([3, 1]))
    assert [len(rows) for rows in found] == [4, 12, 1]
    assert all(torch.equal(a, b) for a, b in zip(found, [image, torch.cat(clips[:3]), clips[3]], strict=True))
    sizes = {name: table for name, table in inputs.items() if name.endswith("grid_thw")}
    assert [item.num_tokens for item in kimi.adapter.items_of(**sizes, num_chunks_per_video=[3, 1])] == [4, 12, 1]


@pytest.mark.parametrize("counts", [[1], [2, 1], [0, 2], 2, ["2"]])
def test_counts_that_do_not_add_up_to_the_clips_are_refused(kimi: Encoder, counts: Any) -> None:
    inputs = inputs_of(kimi, [Grid(2, 4, 4), Grid(2, 4, 4)])
    with pytest.raises(InputError, match="num_chunks_per_video"):
        kimi.encode_inputs(**inputs, num_chunks_per_video=counts)


def test_nan_in_one_clip_stays_in_it(kimi: Encoder) -> None:
    """Rows for frames that a clip does not have are its own first frame's, with a weight of 0."""
    grids = [Grid(2, 4, 4), Grid(3, 4, 4), Grid(2, 4, 4)]
    inputs = inputs_of(kimi, grids)
    before = kimi.encode_inputs(**inputs)
    inputs["pixel_values_videos"][32:80] = torch.nan
    after = kimi.encode_inputs(**inputs)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    assert after[1].isnan().all()


def test_a_position_table_that_is_not_square_is_refused_before_weights_are_made() -> None:
    config = hf_config(get_preset(PRESET))
    config.vision_config.pos_emb_width = 4
    with pytest.raises(UnsupportedModelError, match="8x4"):
        adapter_class("kimi_k25")(config)


# ------------------------------------------------------------------ files


class WithoutTorchvision:
    """Patches of the model's processor for pictures that are whole merged patches already and need no resizing."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, images: list[Image.Image], max_patches: int = 16384, **kwargs: Any) -> dict[str, Tensor]:
        self.asked.append(max_patches)
        pixels = torch.from_numpy(np.array(images[0], dtype=np.float32)).permute(2, 0, 1)
        _, height, width = pixels.shape
        patches = pixels.view(3, height // 14, 14, width // 14, 14).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, height // 14, width // 14]])}


def test_a_video_is_cut_into_clips_of_four_frames_under_the_processors_names() -> None:
    frames = [Image.new("RGB", (56, 28), (value, 0, 0)) for value in range(10)]
    processor, video = WithoutTorchvision(), load_video(frames)
    batch = preprocess_video(processor, "kimi_k25", video)
    assert batch["video_grid_thw"].tolist() == [[4, 2, 4], [4, 2, 4], [2, 2, 4]]
    assert batch["num_chunks_per_video"].tolist() == [3]
    assert batch["pixel_values_videos"].shape == (80, 3, 14, 14)
    assert batch["pixel_values_videos"][:, 0, 0, 0].tolist() == [value for value in range(10) for _ in range(8)]
    assert set(processor.asked) == {4096}
    grid = grid_of(processor, "kimi_k25", 56, 28, num_frames=10)
    assert all(torch.equal(grid[name], batch[name]) for name in ("video_grid_thw", "num_chunks_per_video"))


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="these processors need torchvision")
@pytest.mark.parametrize("size", [(100, 70), (2000, 1500), (30, 20)], ids=str)
def test_a_video_file_gives_what_the_video_processor_gives_bit_for_bit(size: tuple[int, int]) -> None:
    from transformers import Kimi_K25VideoProcessor

    generator = np.random.default_rng(0)
    arrays = generator.integers(0, 256, (6, size[1], size[0], 3), dtype=np.uint8)
    processor = load_image_processor(get_preset("kimi_k25").processor)
    found = preprocess_video(processor, "kimi_k25", load_video([Image.fromarray(frame) for frame in arrays]))
    frames = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    expected = Kimi_K25VideoProcessor()([frames], do_sample_frames=False, return_tensors="pt")
    assert all(torch.equal(found[name], torch.as_tensor(expected[name])) for name in found)


def test_an_image_keeps_the_processors_names_and_limits() -> None:
    processor = WithoutTorchvision()
    batch = preprocess_images(processor, "kimi_k25", [Image.new("RGB", (56, 28)), Image.new("RGB", (28, 28))])
    assert batch["pixel_values"].shape == (12, 3, 14, 14)
    assert batch["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2]]
    assert set(processor.asked) == {16384}


def test_a_video_file_is_one_item(kimi: Encoder) -> None:
    frames = [Image.new("RGB", (56, 28), (value, 0, 0)) for value in range(6)]
    batch = preprocess_video(WithoutTorchvision(), "kimi_k25", load_video(frames))
    (found,) = kimi.encode_inputs(**batch)
    assert len(found) == 2 * (2 * 4 // 4)


# ------------------------------------------------------------------ checkpoints


def test_a_checkpoint_in_the_published_names_loads_and_gives_the_stock_features(tmp_path: Path) -> None:
    whole = AutoModelForImageTextToText.from_config(hf_config(get_preset(PRESET)), dtype=torch.float32).eval()
    random_weights_(whole.model, ("vision_tower", "mm_projector"))
    whole.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any("wqkv" in name for name in file.keys()), "published checkpoints hold one fused weight"  # noqa: SIM118
    config = EncoderCudaGraphConfig(token_budgets=(64,), backend="traced")
    with Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=config) as encoder:
        inputs = inputs_of(encoder, [Grid(1, 4, 6), Grid(1, 8, 4)])
        found = encoder.encode_inputs(**inputs)
    with torch.no_grad():
        expected = whole.model.get_image_features(**inputs).pooler_output
    assert all(close(one, other) for one, other in zip(found, expected, strict=True))
