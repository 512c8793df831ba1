"""The multi-path engine: plans a path at a time, one gather, refusals. Counts of published sizes need no weights."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from onereplay.adapters import adapter_class
from onereplay.adapters.multipath import GLOBAL, LOCAL, MultiPathAdapter
from onereplay.checking import FP32_TOLERANCE
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.encoder import Encoder
from onereplay.errors import InputError
from onereplay.geometry import Grid
from onereplay.presets import get_preset, hf_config

NONE = Grid(1, 0, 0)
PRESETS = ("deepseek_ocr", "deepseek_ocr2", "step3p7", "step3_vl-10b", "step3")


def adapter_of(preset: str) -> MultiPathAdapter:
    config = hf_config(get_preset(preset))
    adapter = adapter_class(config.model_type)(config)
    assert isinstance(adapter, MultiPathAdapter)
    return adapter


@pytest.fixture(scope="module")
def encoder() -> Iterator[Encoder]:
    """Traced on first use, room for 16 global views and 16 local tiles."""
    config = EncoderCudaGraphConfig(token_budgets=(64, 144))
    with Encoder.from_preset("step3@tiny", config=config) as made:
        yield made


def encoded(encoder: Encoder, grids: list[Grid], seed: int = 0) -> tuple[list[Tensor], dict[str, Any]]:
    inputs = encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(seed))
    return encoder.encode_inputs(**inputs), inputs


def assert_plain(encoder: Encoder, found: list[Tensor], inputs: dict[str, Any]) -> None:
    """Each image's rows are those of the plain model: 1e-5, the rule of `checking` for float32."""
    with torch.no_grad():
        expected = encoder.adapter.model.get_image_features(**inputs).pooler_output
    assert [rows.shape for rows in found] == [rows.shape for rows in expected]
    for rows, plain in zip(found, expected, strict=True):
        assert (rows - plain).abs().max() <= FP32_TOLERANCE * plain.abs().max().clamp(min=1)


# ------------------------------------------------------------------ published numbers


@pytest.mark.parametrize(
    ("preset", "grid", "rows"),
    [
        ("deepseek_ocr", NONE, 273),
        *[("deepseek_ocr", Grid(1, r, c), 273 + 10 * r * (10 * c + 1)) for r, c in [(1, 2), (2, 2), (3, 2), (1, 9)]],
        ("deepseek_ocr", Grid(1, 2, 2), 693),
        ("deepseek_ocr", Grid(1, 2, 3), 893),
        *[("deepseek_ocr2", Grid(1, 1, k), 257 + 144 * k) for k in (0, 2, 6)],
        *[(name, Grid(1, 1, k), 169 + 81 * k) for name in PRESETS[2:] for k in (0, 2, 36)],
    ],
)
def test_an_image_has_the_published_number_of_rows(preset: str, grid: Grid, rows: int) -> None:
    adapter = adapter_of(preset)
    sizes = {"num_local_patches": [grid.num_patches]}
    if preset == "deepseek_ocr":
        sizes["patches_grid"] = [[max(grid.w, 1), max(grid.h, 1)]]  # type: ignore[list-item]
    (item,) = adapter.items_of(**sizes)
    assert item.num_rows == rows
    assert not item.unsupported
    assert (LOCAL in item.sizes) == bool(grid.num_patches)


@pytest.mark.parametrize(
    ("preset", "units"),
    [("deepseek_ocr", (256, 100)), ("deepseek_ocr2", (256, 144)), *[(name, (169, 81)) for name in PRESETS[2:]]],
)
def test_each_path_has_a_ladder_of_whole_tiles(preset: str, units: tuple[int, int]) -> None:
    adapter, config = adapter_of(preset), EncoderCudaGraphConfig()
    for path, unit in zip((GLOBAL, LOCAL), units, strict=True):
        ladder = adapter.capacities(path, config)
        assert [capacity.tokens for capacity in ladder[:16]] == [unit * count for count in range(1, 17)]
        assert ladder[-1].tokens <= 5120
        assert all(capacity.sequences == capacity.tokens // unit for capacity in ladder)


@pytest.mark.parametrize("preset", ["deepseek_ocr", "deepseek_ocr2"])
def test_memory_of_sam_stays_bounded_without_a_cap_of_the_users(preset: str) -> None:
    ladder = adapter_of(preset).capacities(GLOBAL, EncoderCudaGraphConfig(max_token_budget=None))
    assert ladder[-1].sequences == 20


# ------------------------------------------------------------------ paths


def test_a_path_that_no_image_uses_runs_nothing(encoder: Encoder) -> None:
    before = encoder.report()
    found, inputs = encoded(encoder, [NONE, NONE])
    after = encoder.report()
    assert "pixel_values_local" not in inputs
    assert_plain(encoder, found, inputs)
    assert sum(after.replays[GLOBAL].values()) == sum(before.replays[GLOBAL].values()) + 1
    assert after.replays[LOCAL] == before.replays[LOCAL]
    assert after.eager == before.eager


@pytest.mark.parametrize(
    "grids",
    [
        [Grid(1, 2, 2)],
        [NONE, Grid(1, 1, 3), NONE],
        [Grid(1, 1, 2), NONE, Grid(1, 3, 2), Grid(1, 1, 1)],
    ],
)
def test_images_with_and_without_local_tiles_are_one_replay_a_path(encoder: Encoder, grids: list[Grid]) -> None:
    before = encoder.report()
    found, inputs = encoded(encoder, grids)
    after = encoder.report()
    assert_plain(encoder, found, inputs)
    for path in (GLOBAL, LOCAL):
        assert sum(after.replays[path].values()) == sum(before.replays[path].values()) + 1
    assert after.eager == before.eager


def test_more_local_tiles_of_one_image_than_the_cap_are_eager_on_that_path_alone(encoder: Encoder) -> None:
    grids = [NONE, Grid(1, 1, 40), NONE]
    inputs = encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(0))
    steps = encoder.manager.plan(encoder.adapter.batch(**inputs)).steps
    assert isinstance(steps[GLOBAL], Replay)
    local = steps[LOCAL]
    assert isinstance(local, Eager)
    assert local.reason is Reason.OVER_LARGEST_BUDGET
    assert_plain(encoder, encoder.encode_inputs(**inputs), inputs)


def test_tiles_of_another_size_are_one_eager_forward_a_path(encoder: Encoder) -> None:
    inputs = {
        "pixel_values": torch.randn(2, 3, 126, 126),
        "pixel_values_local": torch.randn(3, 3, 70, 70),
        "num_local_patches": torch.tensor([0, 3]),
    }
    steps = encoder.manager.plan(encoder.adapter.batch(**inputs)).steps
    assert {step.reason for step in steps.values() if isinstance(step, Eager)} == {Reason.UNSUPPORTED_INPUT}
    assert_plain(encoder, encoder.encode_inputs(**inputs), inputs)


def test_images_joined_and_selected_keep_their_tiles(encoder: Encoder) -> None:
    adapter = encoder.adapter
    generator = torch.Generator().manual_seed(3)
    batches = [adapter.batch(**adapter.example_inputs(grids, generator)) for grids in ([Grid(1, 1, 2), NONE], [NONE])]
    joined = adapter.join(batches)
    apart = [rows for batch in batches for rows in encoder.manager.encode(batch)]
    together = encoder.manager.encode(joined)
    chosen = encoder.manager.encode(adapter.select(joined, [2, 0]))
    for rows, other in zip([*together, *chosen], [*apart, apart[2], apart[0]], strict=True):
        assert (rows - other).abs().max() <= FP32_TOLERANCE * other.abs().max().clamp(min=1)


def test_index_arrays_are_made_once_for_each_arrangement() -> None:
    adapter = adapter_of("deepseek_ocr@tiny")
    made: list[Grid] = []
    stock = adapter.order

    def counted(grid: Grid, *tokens: int) -> Any:
        made.append(grid)
        return stock(grid, *tokens)

    adapter.order = counted  # type: ignore[assignment,method-assign]
    for _ in range(3):
        adapter.items_of(num_local_patches=[6, 0, 6], patches_grid=[[3, 2], [1, 1], [2, 3]])
    assert made == [Grid(1, 2, 3), NONE, Grid(1, 3, 2)]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"pixel_values_local": torch.zeros(1, 3, 126, 126)}, "needs pixel_values, the global view"),
        ({"num_local_patches": [2]}, "adds up to 2 tiles, pixel_values_local has 0"),
        ({"pixel_values_local": torch.zeros(3, 3, 126, 126)}, "adds up to 0 tiles, pixel_values_local has 3"),
        ({"num_local_patches": [0, 0]}, "has 2 entries, pixel_values has 1 images"),
        ({"num_local_patches": [-1]}, "must be a list of integers from 0"),
        ({"num_local_patches": [True]}, "must be a list of integers from 0"),
        ({"num_local_patches": 2}, "must be a list of integers from 0"),
        ({"pixel_values": torch.zeros(1, 3, 182, 168)}, "takes square tiles"),
        ({"pixel_values": torch.zeros(1, 3, 183, 183)}, "takes multiples of 14"),
        ({"grid": 1}, "does not take grid; it takes pixel_values"),
    ],
)
def test_inputs_that_do_not_fit_together_are_refused(encoder: Encoder, inputs: dict[str, Any], words: str) -> None:
    given = {"pixel_values": torch.zeros(1, 3, 182, 182), **inputs}
    if list(inputs) == ["pixel_values_local"] and len(inputs["pixel_values_local"]) == 1:
        del given["pixel_values"]
    with pytest.raises(InputError, match=words):
        encoder.encode_inputs(**given)


def test_tiles_of_two_sizes_cannot_be_joined(encoder: Encoder) -> None:
    batches = [encoder.adapter.batch(pixel_values=torch.zeros(1, 3, side, side)) for side in (182, 126)]
    with pytest.raises(InputError, match="global tiles of several sizes"):
        encoder.adapter.join(batches)
