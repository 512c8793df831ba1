"""GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR: positions resampled from taps, one sequence a frame, any number of frames.

Tolerance: the fp32 rule of `onereplay.checking` where features are compared; see the test for positions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionEmbeddings

from onereplay import Encoder, EncoderCudaGraphConfig, accelerate, geometry
from onereplay.adapters import adapter_class
from onereplay.adapters.interpolation import sum_taps
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.errors import InputError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_, vision_model
from onereplay.preprocess import grid_of, load_image_processor, preprocess_images
from onereplay.presets import get_preset, hf_config
from tests.adapters.conftest import tiny_preset
from tests.adapters.test_failures import agrees, made

GLM = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
WITH_TABLE = GLM[:3]
PHOTO = Grid(1, 18, 18)
"""252x252 pixels: 81 tokens, which neither frames nor powers of two divide."""


def model_of(model_type: str) -> Any:
    """The vision modules of a tiny model with random weights."""
    parts = adapter_class(model_type).parts
    config = hf_config(get_preset(tiny_preset(model_type)))
    model = vision_model(config, device="cpu", dtype=torch.float32, parts=parts)
    random_weights_(model, parts)
    return model


def whole_model(model_type: str) -> Any:
    model = AutoModelForImageTextToText.from_config(hf_config(get_preset(tiny_preset(model_type)))).eval()
    random_weights_(model, tuple(name for name, _ in model.named_children()))
    return model


def inputs_of(model: Any, grids: list[Grid]) -> dict[str, Tensor]:
    adapter = adapter_class(model.config.model_type)(model.config)
    return adapter.example_inputs(grids, torch.Generator().manual_seed(0))


def eager(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    adapter = adapter_class(model.config.model_type)(model.config, model)
    return torch.cat(EncoderCudaGraphManager(adapter).encode(adapter.batch(**inputs)))


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1))


# ------------------------------------------------------------------ positions


@pytest.mark.parametrize(
    "grid", [PHOTO, Grid(1, 24, 24), Grid(1, 2, 2), Grid(1, 34, 46), Grid(1, 2, 96), Grid(3, 6, 4)]
)
def test_positions_from_taps_are_those_of_the_stock_module(grid: Grid) -> None:
    """float32 knows a place on the table of 24 to 24 * 6e-8; entries of order 1 differ by that between neighbours."""
    stock = Glm4vVisionEmbeddings(hf_config(get_preset("glm4v-9b@tiny")).vision_config)
    torch.nn.init.normal_(stock.position_embedding.weight)
    places = torch.from_numpy(geometry.merged_positions(grid, 2))
    frames = torch.tensor([[1, *grid[1:]]] * grid.t)
    patches = torch.zeros(grid.num_patches, stock.embed_dim)
    with torch.no_grad():
        expected = stock(patches, frames[:, 1] * frames[:, 2], frames, places[:, 0], places[:, 1])
        indices, weights = (torch.from_numpy(taps) for taps in geometry.bicubic_taps(grid, 24, 2))
        found = sum_taps(stock.position_embedding.weight, indices, weights)
    assert (found - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("model_type", WITH_TABLE)
def test_the_stock_module_keeps_its_embeddings_and_a_change_of_the_table_is_seen(model_type: str) -> None:
    model = model_of(model_type)
    stock, names = model.visual.embeddings, list(model.state_dict())
    inputs = inputs_of(model, [PHOTO, Grid(2, 4, 6)])
    adapter = adapter_class(model_type)(model.config, model)
    manager = EncoderCudaGraphManager(adapter)
    before = torch.cat(manager.encode(adapter.batch(**inputs)))
    with torch.no_grad():
        stock.position_embedding.weight.mul_(-1)
    after = torch.cat(manager.encode(adapter.batch(**inputs)))
    assert model.visual.embeddings is stock
    assert list(model.state_dict()) == names
    assert close(after, plain_features(adapter, model, inputs))
    assert (after - before).abs().max() > 0.1


def test_glm_ocr_has_no_table_and_no_taps() -> None:
    adapters = [adapter_class(name)(hf_config(get_preset(tiny_preset(name)))) for name in ("glm_ocr", "glm4v")]
    ocr, other = ([buffer.name for buffer in adapter.paths()["vision"].buffers] for adapter in adapters)
    assert ocr == ["pixels", "position_ids", "cu_seqlens"]
    assert other == [*ocr, "tap_indices", "tap_weights"]


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("model_type", ["glm4v", "glm_ocr"])
@pytest.mark.parametrize("budgets", [None, (81,), (82,), (83, 95), (64, 97), (100, 333)])
def test_252x252_is_right_at_every_grid_of_budgets(model_type: str, budgets: tuple[int, ...] | None) -> None:
    config = EncoderCudaGraphConfig() if budgets is None else EncoderCudaGraphConfig(token_budgets=budgets)
    with Encoder.from_preset(tiny_preset(model_type), config=config) as encoder:
        step = agrees(encoder, [PHOTO])
        assert isinstance(step, Replay)
        assert step.capacity.tokens == min(tokens for tokens in (budgets or (96,)) if tokens >= 81)


@pytest.mark.parametrize("model_type", ["glm4v", "glm_ocr"])
def test_a_video_of_600_frames_is_replayed_where_its_frames_have_slots(model_type: str) -> None:
    with made((640,), model_type, max_frames_per_batch=600) as encoder:
        assert isinstance(agrees(encoder, [Grid(600, 2, 2)]), Replay)
        assert isinstance(agrees(encoder, [Grid(300, 2, 4)]), Replay)


@pytest.mark.parametrize("model_type", ["glm4v", "glm_ocr"])
@pytest.mark.parametrize(
    ("grid", "reason"),
    [(Grid(600, 2, 2), Reason.TOO_MANY_SEQUENCES), (Grid(600, 4, 4), Reason.OVER_LARGEST_BUDGET)],
    ids=str,
)
def test_a_video_of_600_frames_is_one_eager_forward_where_it_does_not_fit(
    model_type: str, grid: Grid, reason: Reason
) -> None:
    with made((640,), model_type, max_items_per_batch=4) as encoder:
        step = agrees(encoder, [grid])
        assert isinstance(step, Eager)
        assert step.reason is reason


@pytest.mark.parametrize("model_type", GLM)
def test_a_batch_of_images_and_videos_is_each_item_alone(model_type: str) -> None:
    grids = [PHOTO, Grid(1, 2, 6), Grid(5, 4, 4), Grid(2, 6, 4)]
    with made((256,), model_type) as encoder:
        assert isinstance(agrees(encoder, grids), Replay)
        inputs = inputs_of(encoder.adapter.model, grids)
        together = encoder.encode_inputs(**inputs)
        rows = inputs["pixel_values_videos"][5 * 16 :]
        (alone,) = encoder.encode_inputs(pixel_values_videos=rows, video_grid_thw=torch.tensor([[2, 6, 4]]))
        assert close(together[3], alone)
        frames = [
            encoder.encode_inputs(pixel_values=frame, image_grid_thw=torch.tensor([[1, 6, 4]]))[0]
            for frame in rows.split(24)
        ]
        assert close(together[3], torch.cat(frames)), "one sequence a frame"


@pytest.mark.parametrize("model_type", GLM)
def test_a_grid_that_does_not_merge_is_refused(model_type: str) -> None:
    adapter = adapter_class(model_type)(hf_config(get_preset(tiny_preset(model_type))))
    with pytest.raises(InputError, match=r"image_grid_thw has \(1, 4, 5\); height and width must be multiples of 2"):
        adapter.items_of(image_grid_thw=[[1, 4, 5]])


@pytest.mark.parametrize("name", ["glm4v-9b", "glm46v-9b", "glm_ocr-0.9b"])
@pytest.mark.parametrize(
    ("size", "tokens"), [((252, 252), 81), ((28, 28), 9), ((640, 480), 391), ((6000, 4000), 6144)], ids=str
)
def test_images_have_the_tokens_of_the_published_processor(name: str, size: tuple[int, int], tokens: int) -> None:
    """Sides rounded to 28 pixels; twice an image has at least 112 * 112 and at most 2 * 6,144 * 28 * 28 of them."""
    preset = get_preset(name)
    processor = load_image_processor(preset.processor)
    found = grid_of(processor, preset.model_type, *size)["image_grid_thw"]
    (item,) = adapter_class(preset.model_type)(hf_config(preset)).items_of(image_grid_thw=found)
    assert item.num_tokens == tokens


@pytest.mark.parametrize("model_type", GLM)
def test_files_become_what_the_adapter_takes(model_type: str) -> None:
    preset = get_preset(tiny_preset(model_type))
    images = [Image.new("RGB", size, "red") for size in ((252, 252), (120, 60))]
    batch = preprocess_images(load_image_processor(preset.processor), model_type, images)
    assert batch["image_grid_thw"][0].tolist() == [*PHOTO]
    assert len(adapter_class(model_type)(hf_config(preset)).batch(**batch).items) == 2


# ------------------------------------------------------------------ whole models


@pytest.mark.parametrize("model_type", GLM)
def test_a_saved_checkpoint_encodes_as_the_stock_model(model_type: str, tmp_path: Path) -> None:
    stock = whole_model(model_type)
    stock.save_pretrained(tmp_path)
    inputs = inputs_of(stock.model, [PHOTO, Grid(1, 4, 6)])
    config = EncoderCudaGraphConfig(token_budgets=(128,))
    with (
        Encoder.from_pretrained(tmp_path, device="cpu", dtype=torch.float32, config=config) as encoder,
        torch.no_grad(),
    ):
        found = encoder.encode_inputs(**inputs)
        expected = stock.get_image_features(**inputs).pooler_output
    assert [rows.shape for rows in found] == [rows.shape for rows in expected]
    assert close(torch.cat(found), torch.cat(expected))


@pytest.mark.parametrize("model_type", GLM)
def test_an_accelerated_model_gives_stock_features_of_images_and_videos(model_type: str) -> None:
    stock, model = whole_model(model_type), whole_model(model_type)
    inputs = inputs_of(stock.model, [PHOTO, Grid(1, 4, 6), Grid(3, 4, 4), Grid(2, 2, 2)])
    with accelerate(model, EncoderCudaGraphConfig(token_budgets=(128,))) as handle, torch.no_grad():
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            given = (inputs[pixels], inputs[f"{kind}_grid_thw"])
            found, expected = (getattr(each, f"get_{kind}_features")(*given).pooler_output for each in (model, stock))
            assert type(found) is type(expected) is tuple
            assert [rows.shape for rows in found] == [rows.shape for rows in expected]
            assert close(torch.cat(found), torch.cat(expected))
        assert handle.report().replays == {"vision": {128: 2}}


@pytest.mark.parametrize("model_type", GLM)
def test_rewrites_change_nothing_but_rounding(model_type: str) -> None:
    model = model_of(model_type)
    inputs = inputs_of(model, [PHOTO, Grid(2, 4, 4)])
    adapter = adapter_class(model_type)(model.config, model, "auto", ("patch_embedding", "aligned_mlp"))
    found = torch.cat(EncoderCudaGraphManager(adapter).encode(adapter.batch(**inputs)))
    assert close(found, eager(model, inputs))
