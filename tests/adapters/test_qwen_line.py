"""What the towers of the Qwen line share: images and videos in one batch, any number of frames, loading.

Tolerance: the fp32 rule of `onereplay.checking`, 1e-5 of the largest reference value.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from onereplay import EncoderCudaGraphConfig
from onereplay.acceleration import accelerate
from onereplay.adapters import adapter_class
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.encoder import Encoder
from onereplay.errors import InputError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.presets import get_preset, hf_config
from tests.adapters.conftest import tiny_preset

TYPES = ("qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
CONFIG = EncoderCudaGraphConfig(token_budgets=(64, 128), backend="traced", max_items_per_batch=16)


@pytest.fixture(scope="module", params=TYPES)
def line(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    """A tiny random encoder of each."""
    with Encoder.from_preset(tiny_preset(request.param), config=CONFIG) as made:
        yield made


def inputs_of(encoder: Encoder, grids: list[Grid], seed: int = 0) -> dict[str, Tensor]:
    return encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(seed))


def assert_as_plain(encoder: Encoder, inputs: dict[str, Tensor]) -> Replay | Eager:
    """The rows of one batch are those of the stock methods; returns what the batch was."""
    batch = encoder.adapter.batch(**inputs)
    found = torch.cat(encoder.manager.encode(batch))
    expected = plain_features(encoder.adapter, encoder.adapter.model, inputs)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)
    return encoder.manager.plan(batch).steps["vision"]


def test_images_and_videos_are_one_replay_images_first(line: Encoder) -> None:
    inputs = inputs_of(line, [Grid(1, 8, 8), Grid(3, 4, 4), Grid(1, 4, 6), Grid(2, 6, 4)])
    assert [len(rows) for rows in line.encode_inputs(**inputs)] == [16, 6, 12, 12]
    assert isinstance(assert_as_plain(line, inputs), Replay)


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        (Grid(1, 2, 2), None),
        (Grid(16, 2, 4), None),
        (Grid(17, 2, 4), Reason.TOO_MANY_SEQUENCES),
        (Grid(130, 4, 4), Reason.OVER_LARGEST_BUDGET),
    ],
)
def test_a_video_of_any_number_of_frames_is_right(line: Encoder, grid: Grid, reason: Reason | None) -> None:
    rows = grid.num_patches
    pixels = torch.randn(rows, *line.adapter.pixel_shape)  # type: ignore[attr-defined]
    step = assert_as_plain(line, {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])})
    assert (step.reason if isinstance(step, Eager) else None) == reason


def test_an_image_does_not_see_its_neighbours(line: Encoder) -> None:
    """Alone and among others the rows are the same up to rounding: matrix products of other sizes."""
    grids = [Grid(1, 6, 8), Grid(1, 2, 2), Grid(1, 10, 4)]
    inputs = inputs_of(line, grids)
    starts = [0, 48, 52, 92]
    together = line.encode_inputs(**inputs)
    for place, grid in enumerate(grids):
        pixels = inputs["pixel_values"][starts[place] : starts[place + 1]]
        (alone,) = line.encode_inputs(pixel_values=pixels, image_grid_thw=torch.tensor([grid]))
        assert (alone - together[place]).abs().max() <= FP32_TOLERANCE * alone.abs().max().clamp(min=1)


def test_a_token_is_four_patches_and_as_wide_as_the_language_model(line: Encoder) -> None:
    adapter = line.adapter
    (item,) = adapter.items_of(video_grid_thw=torch.tensor([[3, 8, 6]]))
    assert item.num_tokens == 3 * 8 * 6 // 4
    parts = 4 if "vl" in adapter.model_type and "qwen3" in adapter.model_type else 1
    assert adapter.hidden_size == parts * adapter.config.text_config.hidden_size  # type: ignore[attr-defined]


@pytest.mark.parametrize("table", [[[1, 3, 4]], [[1, 4, 5]], [[0, 4, 4]], [[1, 0, 4]]])
def test_grids_without_whole_tokens_are_refused(line: Encoder, table: list[list[int]]) -> None:
    with pytest.raises(InputError, match=r"multiples of 2 patches|has no token"):
        line.adapter.items_of(image_grid_thw=table)


def test_the_users_model_stays_stock(line: Encoder) -> None:
    """What an adapter changes, it changes in its own copies."""
    stock = AutoModelForImageTextToText.from_config(hf_config(get_preset(tiny_preset(line.adapter.model_type))))
    tower = line.adapter.model.visual
    assert [(name, type(part)) for name, part in tower.named_modules()] == [
        (name, type(part)) for name, part in stock.model.visual.named_modules()
    ]


# -------- checkpoints


def save(model_type: str, folder: Path, *, prefix: str | None = None) -> None:
    """A tiny whole model with random weights; `prefix` renames its vision weights as older checkpoints do."""
    model = AutoModelForImageTextToText.from_config(hf_config(get_preset(tiny_preset(model_type))))
    random_weights_(model, tuple(name for name, _ in model.named_children()), seed=5)
    model.save_pretrained(folder)
    if prefix is not None:
        path = folder / "model.safetensors"
        tensors = {
            f"{prefix}{name.partition('visual.')[2]}" if "visual." in name else name: tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("model_type", TYPES)
def test_a_saved_checkpoint_encodes_as_the_stock_method(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with Encoder.from_pretrained(tmp_path, dtype=torch.float32, config=CONFIG) as encoder:
        inputs = inputs_of(encoder, [Grid(1, 6, 4), Grid(2, 4, 4)])
        found = torch.cat(encoder.encode_inputs(**inputs))
        expected = plain_features(encoder.adapter, stock.model, inputs)
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)


def test_the_published_names_of_qwen2_vl_weights_load_alike(tmp_path: Path) -> None:
    """`visual.*` on the hub, `model.visual.*` as transformers saves it."""
    save("qwen2_vl", tmp_path / "new")
    save("qwen2_vl", tmp_path / "old", prefix="visual.")
    features = []
    for folder in ("new", "old"):
        with Encoder.from_pretrained(tmp_path / folder, dtype=torch.float32, config=CONFIG) as encoder:
            features.append(torch.cat(encoder.encode_inputs(**inputs_of(encoder, [Grid(1, 6, 4)]))))
    assert torch.equal(*features)


PUBLISHED: list[tuple[dict[str, Any], int]] = [
    ({"model_type": "qwen2_vl", "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "in_chans": 3}, 3584),
    ({"model_type": "qwen3_vl", "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]}, 4 * 4096),
    ({"model_type": "qwen3_vl_moe", "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24]}, 4 * 2048),
    ({"model_type": "qwen3_5", "out_hidden_size": 5120, "deepstack_visual_indexes": []}, 5120),
    ({"model_type": "qwen3_5_moe", "out_hidden_size": 2048, "deepstack_visual_indexes": []}, 2048),
]


@pytest.mark.parametrize(("vision", "width"), PUBLISHED, ids=lambda value: "")
def test_vision_settings_as_the_hub_spells_them_give_the_width_of_a_row(
    vision: dict[str, Any], width: int, tmp_path: Path
) -> None:
    """There `vision_config` has the model type of the whole, and Qwen3.5 an empty list of deepstack layers."""
    config = {"model_type": vision["model_type"], "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    adapter = adapter_class(vision["model_type"])(AutoConfig.from_pretrained(tmp_path))
    assert adapter.paths()["vision"].outputs[0].shape == (width,)
    (item,) = adapter.items_of(image_grid_thw=[[1, 34, 46]])
    assert item.num_tokens == math.prod((34, 46)) // 4


# -------- the whole model


@pytest.mark.parametrize("model_type", TYPES)
def test_an_accelerated_model_has_the_stock_logits_for_images_and_videos(model_type: str) -> None:
    """Qwen3 writes each frame of a video apart from the others; so do the prompts of all here. Its deepstack levels of
    images and of videos are joined by the language model: each must come in the form that it expects."""
    stock, model = (
        AutoModelForImageTextToText.from_config(hf_config(get_preset(tiny_preset(model_type)))).eval() for _ in range(2)
    )
    for each in (stock, model):
        random_weights_(each, tuple(name for name, _ in each.named_children()), seed=2)
    start, end, image, video = 60, 61, 62, 63
    grids = [Grid(1, 4, 6), Grid(1, 2, 2), Grid(2, 4, 4)]
    tokens = [(image, 6), (image, 1), *([(video, 8)] if model_type == "qwen2_vl" else [(video, 4), (video, 4)])]
    ids = torch.tensor([[5, *(i for kind, count in tokens for i in (start, *[kind] * count, end, 7))]])
    with accelerate(model, CONFIG) as handle, torch.no_grad():
        inputs = handle.adapter.example_inputs(grids, torch.Generator().manual_seed(0))
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["mm_token_type_ids"] = (ids == image).int() + 2 * (ids == video).int()
        found, expected = model(**inputs).logits, stock(**inputs).logits
        assert handle.report().items == 3
        assert handle.report().eager == {"vision": {}}
        inputs["pixel_values_videos"] = -inputs["pixel_values_videos"]
        other = stock(**inputs).logits
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)
    assert (other - expected).abs().max() > 0.01 * expected.abs().max(), "the logits depend on the video"
