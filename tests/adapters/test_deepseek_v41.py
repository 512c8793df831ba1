"""DeepSeek-V4.1: against a plain implementation on the published weight names, its counts, its processor, its refusals.

Tolerance: float32, 1e-5 of the largest value (see `onereplay.checking`): the same sums in another order.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel

from onereplay import EncoderCudaGraphConfig, accelerate, models
from onereplay.adapters.deepseek_v41 import DeepseekV41
from onereplay.checking import FP32_TOLERANCE
from onereplay.encoder import Encoder, planner
from onereplay.errors import CheckpointError, ConfigError, InputError
from onereplay.preprocess.deepseek_v41 import PatchProcessor
from onereplay.presets import get_preset, hf_config
from tests.adapters.checkpoints import drawn, write_checkpoint

TINY, FULL = "deepseek_v41-flash@tiny", "deepseek_v41-flash"
CONFIG = EncoderCudaGraphConfig(token_budgets=(64, 128), backend="traced")
WIDTH, LAYERS, HEADS, INNER, HIDDEN = 64, 2, 4, 88, 32
"""Of the tiny preset."""


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a tiny checkpoint.

    Source: the weight map of deepseek-ai/DeepSeek-V4.1-Flash as public loaders test it: 259 names under `vision.`, 4
    under `aligner.`, and the three delimiters.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (WIDTH, 3 * 14 * 14),
        "vision.patch_embed.proj.bias": (WIDTH,),
        "vision.norm.weight": (WIDTH,),
        "aligner.w1.weight": (HIDDEN, 9 * WIDTH),
        "aligner.w1.bias": (HIDDEN,),
        "aligner.w2.weight": (HIDDEN, HIDDEN),
        "aligner.w2.bias": (HIDDEN,),
        "image_start": (HIDDEN,),
        "image_newline": (HIDDEN,),
        "image_end": (HIDDEN,),
        "embed.weight": (7, HIDDEN),
        "head.weight": (7, HIDDEN),
        "norm.weight": (HIDDEN,),
        "layers.0.attn.wq_a.weight": (8, HIDDEN),
        "layers.0.ffn.gate.bias_vl": (4,),
        "mtp.0.main_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        block = f"vision.blocks.{layer}"
        shapes |= {
            f"{block}.norm1.weight": (WIDTH,),
            f"{block}.attn.wqkv.weight": (3 * WIDTH, WIDTH),
            f"{block}.attn.wqkv.bias": (3 * WIDTH,),
            f"{block}.attn.wo.weight": (WIDTH, WIDTH),
            f"{block}.attn.wo.bias": (WIDTH,),
            f"{block}.norm2.weight": (WIDTH,),
            f"{block}.mlp.w1.weight": (2 * INNER, WIDTH),
            f"{block}.mlp.w2.weight": (WIDTH, INNER),
        }
    return shapes


def plain(weights: Mapping[str, Tensor], patches: Tensor, grids: list[tuple[int, int]]) -> list[Tensor]:
    """The published computation, one image at a time, from the weights alone."""
    found, start = [], 0
    for height, width in grids:
        image = patches[start : start + height * width]
        start += height * width
        picture = plain_tower(weights, image, height, width).view(height, width, WIDTH).permute(2, 0, 1)
        filled = F.pad(picture, (0, -width % 3, 0, -height % 3))
        units = F.unfold(filled[None], 3, stride=3)[0].T
        inner = F.gelu(F.linear(units, weights["aligner.w1.weight"], weights["aligner.w1.bias"]))
        tokens = F.linear(inner, weights["aligner.w2.weight"], weights["aligner.w2.bias"])
        rows = [weights["image_start"]]
        for line in tokens.view(math.ceil(height / 3), -1, HIDDEN):
            rows += [*line, weights["image_newline"]]
        found.append(torch.stack([*rows, weights["image_end"]]))
    return found


def plain_tower(weights: Mapping[str, Tensor], patches: Tensor, height: int, width: int) -> Tensor:
    def norm(name: str, rows: Tensor) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    bias = weights["vision.patch_embed.proj.bias"]
    hidden = F.linear(patches.flatten(1), weights["vision.patch_embed.proj.weight"], bias)
    head_size = WIDTH // HEADS
    turn = rotations(height, width, head_size)
    for layer in range(LAYERS):
        block = f"vision.blocks.{layer}"
        rows = F.linear(
            norm(f"{block}.norm1", hidden), weights[f"{block}.attn.wqkv.weight"], weights[f"{block}.attn.wqkv.bias"]
        )
        query, key, value = rows.split(WIDTH, dim=1)
        heads = []
        for head in range(HEADS):
            own = slice(head * head_size, (head + 1) * head_size)
            q, k = (torch.einsum("pij,pj->pi", turn, rows[:, own]) for rows in (query, key))
            heads.append((q @ k.T / head_size**0.5).softmax(-1) @ value[:, own])
        mixed = F.linear(torch.cat(heads, dim=1), weights[f"{block}.attn.wo.weight"], weights[f"{block}.attn.wo.bias"])
        hidden = hidden + mixed
        gate, up = F.linear(norm(f"{block}.norm2", hidden), weights[f"{block}.mlp.w1.weight"]).split(INNER, dim=1)
        hidden = hidden + F.linear(gate * gate.sigmoid() * up, weights[f"{block}.mlp.w2.weight"])
    return norm("vision.norm", hidden)


def rotations(height: int, width: int, size: int) -> Tensor:
    """One rotation matrix a patch, `(patches, size, size)`: rows turn the first half of the pairs, columns the rest."""
    turn = torch.zeros(height * width, size, size)
    for patch in range(height * width):
        for pair in range(size // 2):
            place = divmod(patch, width)[pair // (size // 4)]
            angle = place / 10000.0 ** (pair % (size // 4) / (size // 4))
            first, second = pair, pair + size // 2
            turn[patch, first, first] = turn[patch, second, second] = math.cos(angle)
            turn[patch, first, second], turn[patch, second, first] = -math.sin(angle), math.sin(angle)
    return turn


def published_config() -> dict[str, Any]:
    """The tiny preset's, with the entries of the published file that are for others to read."""
    config = dict(get_preset(TINY).config)
    config["text_config"] = {
        "hidden_size": HIDDEN,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
        "compress_ratios": [0, 0, 2],
    }
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"}
    return config


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return drawn(published_shapes())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("v41"), published_config(), weights)


def inputs(grids: list[tuple[int, int]], seed: int = 0) -> dict[str, Tensor]:
    patches = sum(height * width for height, width in grids)
    pixels = torch.randn(patches, 3, 14, 14, generator=torch.Generator().manual_seed(seed))
    return {"patches": pixels, "vit_grid": torch.tensor(grids)}


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [rows.shape for rows in found] == [rows.shape for rows in expected]
    for rows, wanted in zip(found, expected, strict=True):
        assert (rows - wanted).abs().max() <= FP32_TOLERANCE * wanted.abs().max().clamp(min=1)


# --- numbers


def test_replay_eager_and_the_plain_model_are_the_published_computation(
    checkpoint: Path, weights: dict[str, Tensor]
) -> None:
    grids = [(1, 1), (4, 5), (6, 9), (2, 7), (3, 3)]
    given = inputs(grids)
    expected = plain(weights, given["patches"], grids)
    with Encoder.from_pretrained(checkpoint, config=CONFIG) as encoder:
        assert_close(encoder.encode_inputs(**given), expected)
        assert encoder.report().replays == {"vision": {64: 1}}
        assert_close(list(encoder.adapter.model.get_image_features(**given).pooler_output), expected)
        large = inputs([(40, 30)])
        assert_close(encoder.encode_inputs(**large), plain(weights, large["patches"], [(40, 30)]))
        assert sum(encoder.report().eager["vision"].values()) == 1


def test_one_forward_for_any_batch(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    plain_forward = DeepseekV41.forward
    with Encoder.from_pretrained(checkpoint, config=CONFIG) as encoder:

        def counted(self: DeepseekV41, *args: Any) -> Any:
            runs.append(1)
            return plain_forward(self, *args)

        monkeypatch.setattr(DeepseekV41, "forward", counted)
        found = encoder.encode_inputs(**inputs([(9, 9)] * 70))
    assert len(found) == 70
    assert len(runs) == 1


def test_squares_at_the_edge_take_nothing_from_a_neighbour_or_from_padding(checkpoint: Path) -> None:
    """A square that is not full is filled up with zeros, though the rows gathered in their place hold NaN."""
    with Encoder.from_pretrained(checkpoint, config=CONFIG) as encoder:
        alone = encoder.encode_inputs(**inputs([(4, 4)]))[0]
        two = inputs([(4, 4), (5, 2)])
        two["patches"][16:] = torch.nan
        beside = encoder.encode_inputs(**two)[0]
    assert torch.equal(alone, beside)


def test_transformers_loads_the_published_names_and_writes_them_again(
    checkpoint: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    models.register()
    with Encoder.from_pretrained(checkpoint, config=CONFIG) as encoder:
        given = inputs([(4, 5), (2, 2)])
        expected = encoder.encode_inputs(**given)
        encoder.adapter.model.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert_close(list(model.get_image_features(**given).pooler_output), expected)


def test_an_accelerated_model_gives_the_same_features_in_the_same_type(checkpoint: Path) -> None:
    models.register()
    given = inputs([(4, 5), (7, 7)])
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


@pytest.mark.parametrize(("grid", "rows"), [((39, 39), 184), ((1, 1), 4), ((4, 7), 10), ((3, 3), 4), ((96, 93), 1026)])
def test_a_span_has_a_newline_a_row_and_two_ends(grid: tuple[int, int], rows: int) -> None:
    adapter = DeepseekV41(hf_config(get_preset(FULL)))
    (item,) = adapter.items_of(vit_grid=[list(grid)])
    down, across = (math.ceil(side / 3) for side in grid)
    assert item.num_rows == rows == down * (across + 1) + 2
    assert item.num_tokens == down * across
    assert item.sizes["vision"].patches == grid[0] * grid[1]


def test_no_image_of_the_processor_is_longer_than_the_bound_on_sequences() -> None:
    adapter = DeepseekV41(hf_config(get_preset(FULL)))
    preprocessor, _ = planner(f"preset:{FULL}", EncoderCudaGraphConfig())
    assert adapter.max_sequence_patches == 1021 * 9
    for size in ((40000, 1), (1, 40000), (9000, 9000), (3000, 100)):
        height, width = preprocessor.processor.patch_grid(*size)
        assert height * width <= adapter.max_sequence_patches


# --- the processor


def full_processor() -> PatchProcessor:
    processor: PatchProcessor = planner(f"preset:{FULL}", EncoderCudaGraphConfig())[0].processor
    return processor


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((544, 544), (39, 39)),  # min_pixels exactly; 184 rows
        ((1, 1), (39, 39)),
        ((600, 800), (58, 43)),
        ((640, 480), (35, 46)),
        ((4000, 4000), (93, 93)),  # 31 x 31 tokens, 994 rows
        ((100000, 10), (3, 3063)),  # one row of 1,021 tokens
        ((10, 100000), (1533, 3)),  # one column of 511 tokens
    ],
)
def test_the_grid_of_an_image(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert full_processor().patch_grid(*size) == grid


def test_the_grids_of_a_public_test_with_small_patches() -> None:
    """NVIDIA's TensorRT-LLM tests its processor with patches of 2 pixels and no minimum: 6x6 and 14x8 pixels."""
    small = PatchProcessor(patch_size=2, downsample_ratio=3, max_image_tokens=1024, min_pixels=0)
    assert (small.patch_grid(6, 6), small.patch_grid(14, 8)) == ((3, 3), (4, 7))
    assert (small.span(3, 3), small.span(4, 7)) == (4, 10)


@given(st.integers(1, 20000), st.integers(1, 20000))
@settings(max_examples=200, deadline=None)
def test_no_span_is_longer_than_the_most(width: int, height: int) -> None:
    processor = full_processor()
    assert 4 <= processor.span(*processor.patch_grid(width, height)) <= 1024


def test_patches_are_cut_out_of_the_padded_image_row_by_row() -> None:
    preprocessor, _ = planner(f"preset:{TINY}", EncoderCudaGraphConfig())
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 130, 3), dtype=np.uint8))
    batch = preprocessor.batch(image)
    (patches,), (grid,) = batch.pixels, batch.grids
    assert grid[1:] == (7, 10)
    padded = ImageOps.pad(image, (140, 98), color=(127, 127, 127))
    for place, patch in enumerate(patches):
        row, column = divmod(place, 10)
        cut = padded.crop((14 * column, 14 * row, 14 * (column + 1), 14 * (row + 1)))
        expected = (torch.from_numpy(np.array(cut)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
        assert torch.equal(patch, expected)


def test_a_wide_image_is_squeezed_where_the_configuration_bounds_the_ratio() -> None:
    wide = PatchProcessor(patch_size=14, downsample_ratio=3, max_image_tokens=1024, min_pixels=0, max_wh_ratio=8)
    assert wide.patch_grid(14000, 140) == (10, 80)
    assert len(wide.patches(Image.new("RGB", (1400, 14), (255, 0, 0)))) == 8
    assert wide.patches(Image.new("RGB", (1400, 14), (255, 0, 0)))[:, 0].unique().tolist() == [1.0]


def test_sizes_alone_say_what_pixels_say_and_files_become_features() -> None:
    image = Image.new("RGB", (100, 60), (200, 10, 10))
    with Encoder.from_preset(TINY, config=CONFIG) as encoder:
        item, _ = encoder.preprocessor.item(image)
        (features,) = encoder.encode([image])
        assert encoder.preprocessor.batch(image).items == (item,)
    assert features.shape == (item.num_rows, HIDDEN)


def test_an_encoder_on_a_model_needs_no_processor_given() -> None:
    models.register()
    model = AutoModel.from_config(hf_config(get_preset(TINY))).eval()
    with Encoder(model, CONFIG) as encoder:
        assert len(encoder.encode([Image.new("RGB", (60, 60))])) == 1


def test_an_impossible_processor_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_image_tokens=3"):
        PatchProcessor(patch_size=14, downsample_ratio=3, max_image_tokens=3, min_pixels=0)


# --- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patches": None}, "come together; give both"),
        ({"vit_grid": None}, "come together; give both"),
        ({"patches": [[1.0]]}, "patches is a list; give a tensor"),
        ({"vit_grid": torch.tensor([[4, 5], [2, 3]])}, r"asks for \(26, 3, 14, 14\)"),
        ({"vit_grid": torch.tensor([[4, 5], [0, 2]])}, "has no token"),
        ({"patches": torch.zeros(24, 588)}, r"has shape \(24, 588\)"),
        ({"llm_grid": torch.tensor([[2, 2], [1, 2]])}, "llm_grid does not follow from vit_grid"),
        ({"types": torch.zeros(3)}, "types has 3 entries, the spans of vit_grid have 12 rows"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    adapter = DeepseekV41(hf_config(get_preset(TINY)))
    with pytest.raises(InputError, match=message):
        adapter.batch(**{**inputs([(4, 5), (2, 2)]), **change})


def test_what_follows_from_the_grid_may_be_given_too() -> None:
    adapter = DeepseekV41(hf_config(get_preset(TINY)))
    batch = adapter.batch(**inputs([(4, 5), (2, 2)]), llm_grid=torch.tensor([[2, 2], [1, 1]]), types=torch.zeros(12))
    assert [item.num_rows for item in batch.items] == [8, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("vision.blocks.1.attn.wqkv.bias"),
            r"no vision\.blocks\.1\.attn\.wqkv\.bias of shape \(192,\)",
        ),
        (lambda t: t.pop("image_newline"), r"no image_newline of shape \(32,\)"),
        (lambda t: t.update({"vision.blocks.2.norm1.weight": torch.ones(64)}), r"vision\.blocks\.2\.norm1\.weight in"),
        (
            lambda t: t.update({"aligner.w1.weight": torch.ones(32, 64)}),
            r"aligner\.w1\.weight in .* has shape \(32, 64\); .* has \(32, 576\)",
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


def test_the_published_sizes_have_the_published_number_of_weights() -> None:
    """259 under `vision.`, 4 under `aligner.`, three delimiters: 266 tensors, as public converters demand."""
    models.register()
    with torch.device("meta"):
        model = AutoModel.from_config(hf_config(get_preset(FULL)))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert len(shapes) == 266
    assert sum(name.startswith("vision.") for name in shapes) == 259
    assert shapes["vision.blocks.31.attn.wqkv.weight"] == (3072, 1024)
    assert shapes["vision.blocks.0.mlp.w1.weight"] == (5632, 1024)
    assert shapes["aligner.w1.weight"] == (5120, 9216)
