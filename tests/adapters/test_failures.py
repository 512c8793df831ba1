"""Public failure reports as kinds (patch 14, merge 2 where numbers are given): each must be right here."""

from typing import Any

import pytest
import torch
from torch import Tensor

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters.qwen2_5_vl import Qwen25VL
from onereplay.checking import FP32_TOLERANCE, plain_features
from onereplay.core.plan import Eager, Reason, Replay
from onereplay.encoder import Encoder
from onereplay.errors import ConfigError, InputError
from onereplay.geometry import Grid
from tests.adapters.conftest import tiny_preset


def made(budgets: tuple[int, ...], model_type: str = "qwen2_5_vl", **options: Any) -> Encoder:
    config = EncoderCudaGraphConfig(token_budgets=budgets, backend="traced", **options)
    return Encoder.from_preset(tiny_preset(model_type), config=config)


def agrees(encoder: Encoder, grids: list[Grid], seed: int = 0) -> Replay | Eager:
    """Encode the grids as one batch, hold the rows against plain transformers (fp32, see `checking`), give the step."""
    inputs = encoder.adapter.example_inputs(grids, torch.Generator().manual_seed(seed))
    batch = encoder.adapter.batch(**inputs)
    before = encoder.report()
    found = torch.cat(encoder.manager.encode(batch))
    expected = plain_features(encoder.adapter, encoder.adapter.model, inputs)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)
    after = encoder.report()
    runs = [
        sum(sum(counts.values()) for counts in {**report.replays}.values())
        + sum(sum(counts.values()) for counts in report.eager.values())
        for report in (before, after)
    ]
    steps = encoder.manager.plan(batch).steps
    assert runs[1] - runs[0] == len(steps), "a batch is one replay or one eager forward of each path that it uses"
    return next(iter(steps.values()))


@pytest.mark.parametrize("grid", [Grid(9, 4, 4), Grid(32, 8, 8), Grid(65, 8, 8), Grid(600, 4, 4)])
def test_1_a_video_of_more_frames_than_the_graph_has_slots_is_right_and_eager(grid: Grid) -> None:
    with made((64, 512), max_items_per_batch=2) as encoder:
        step = agrees(encoder, [grid])
        assert isinstance(step, Eager)
        assert step.reason in (Reason.TOO_MANY_SEQUENCES, Reason.OVER_LARGEST_BUDGET)


def test_1_with_slots_for_its_frames_the_same_video_is_replayed() -> None:
    with made((64, 512), max_items_per_batch=2, max_frames_per_batch=32) as encoder:
        assert isinstance(agrees(encoder, [Grid(9, 4, 4)]), Replay)
        assert isinstance(agrees(encoder, [Grid(32, 8, 8)]), Replay)


@pytest.mark.parametrize("budget", [96, 97, 99, 101])
def test_2_a_budget_that_items_and_windows_do_not_divide_is_captured_and_right(budget: int) -> None:
    """252x252 is a grid of 18x18, 81 tokens."""
    with made((budget,)) as encoder:
        assert isinstance(agrees(encoder, [Grid(1, 18, 18)]), Replay)


def test_3_the_first_of_two_equal_sizes_survives_100_later_batches(encoder: Encoder) -> None:
    path = next(iter(encoder.adapter.paths()))
    _, grids = encoder.adapter.layouts(path, max(64, encoder.adapter.unit(path)), 64)[0]
    generator = torch.Generator().manual_seed(1)

    def fresh() -> list[Tensor]:
        inputs = encoder.adapter.example_inputs(grids, generator)
        return encoder.manager.encode(encoder.adapter.batch(**inputs))

    kept = fresh()
    copies = [rows.clone() for rows in kept]
    for _ in range(100):
        fresh()
    assert all(torch.equal(rows, copy) for rows, copy in zip(kept, copies, strict=True))
    assert not any(encoder.manager.owns(rows) for rows in kept)


def test_4_one_long_sequence_then_64_of_one_token_in_the_smallest_graph(qwen: Encoder) -> None:
    for grids in ([Grid(1, 16, 16)], [Grid(1, 2, 2)] * 64, [Grid(1, 16, 16)]):
        assert agrees(qwen, grids) == Replay(qwen.manager.capacities["vision"][0])


def test_5_one_image_that_fills_a_budget_made_for_eight(qwen: Encoder) -> None:
    with made((324,), max_items_per_batch=8) as encoder:
        assert isinstance(agrees(encoder, [Grid(1, 36, 36)]), Replay)


def test_6_more_items_allowed_than_the_budget_has_tokens_is_a_clamp() -> None:
    with made((64,), max_items_per_batch=128) as encoder:
        (capacity,) = encoder.manager.capacities["vision"]
        assert (capacity.items, capacity.sequences) == (64, 64)
        assert isinstance(agrees(encoder, [Grid(1, 2, 2)] * 64), Replay)


def test_6_duplicates_are_captured_once() -> None:
    with made((64, 64, 128)) as encoder:
        assert [capacity.tokens for capacity in encoder.manager.capacities["vision"]] == [64, 128]


def test_6_a_cap_below_one_item_is_refused_before_weights_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onereplay.loading.vision_model", lambda *a, **k: pytest.fail("weights were made"))
    with pytest.raises(ConfigError, match="holds no tile of 256 tokens; raise it to at least 256"):
        Encoder.from_preset("internvl3-8b", config=EncoderCudaGraphConfig(max_token_budget=255))


def test_7_an_item_over_the_cap_is_one_eager_forward_alone_and_in_company(encoder: Encoder) -> None:
    """(1,146,146) of the report is 5,329 tokens over a cap of 5,120; here it is a token or a tile over the largest."""
    forward_calls = 0
    stock = encoder.adapter.forward

    def counted(*args: Any) -> Any:
        nonlocal forward_calls
        forward_calls += 1
        return stock(*args)

    path = next(iter(encoder.adapter.paths()))
    unit = encoder.adapter.unit(path)
    _, large = encoder.adapter.layouts(path, encoder.manager.capacities[path][-1].tokens + unit, 64)[0]
    _, small = encoder.adapter.layouts(path, max(64 // unit, 1) * unit, 64)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder.adapter, "forward", counted)
        for grids in (large, large + small):
            step = agrees(encoder, grids)
            assert isinstance(step, Eager)
    assert forward_calls == 2


def test_8_capacity_of_tiles_is_counted_in_tiles() -> None:
    """Two items of five tiles do not fit a budget of eight, whatever the bound on items says."""
    with made((32, 64), "internvl", max_items_per_batch=2) as encoder:
        pixels = torch.randn(13, *encoder.adapter.tile_shape)  # type: ignore[attr-defined]
        plans = [
            encoder.manager.plan(encoder.adapter.batch(pixel_values=pixels[: sum(tiles)], num_patches=tiles))
            for tiles in ([1], [5], [5, 5], [13], [1, 1, 1])
        ]
        steps = [steps.steps["vision"] for steps in plans]
        assert [step.capacity.tokens if isinstance(step, Replay) else step.reason for step in steps] == [
            32,
            32,
            64,
            64,
            Reason.TOO_MANY_ITEMS,
        ]


def test_9_an_empty_batch_is_an_empty_list(encoder: Encoder) -> None:
    assert encoder.encode([]) == []
    assert encoder.encode_inputs() == []
    assert encoder.encode_inputs(pixel_values=None) == []


@pytest.mark.parametrize("name", ["image_embeds", "input_ids", "pixel_values_img"])
def test_9_other_inputs_are_refused_by_name_never_a_key_error(encoder: Encoder, name: str) -> None:
    with pytest.raises(InputError, match=f"does not take {name}; it takes"):
        encoder.encode_inputs(**{name: torch.zeros(1)})


def test_9_images_and_videos_in_one_call_are_one_batch_images_first(qwen: Encoder) -> None:
    grids = [Grid(1, 8, 8), Grid(3, 4, 4), Grid(1, 4, 6), Grid(2, 6, 4)]
    inputs = qwen.adapter.example_inputs(grids, torch.Generator().manual_seed(0))
    features = qwen.encode_inputs(**inputs)
    assert [len(rows) for rows in features] == [16, 6, 12, 12]
    assert isinstance(agrees(qwen, grids), Replay)


def test_10_nine_images_with_a_bound_of_eight_are_one_eager_forward_of_nine() -> None:
    with made((1024,), max_items_per_batch=8) as encoder:
        step = agrees(encoder, [Grid(1, 16, 16)] * 9)
        assert isinstance(step, Eager)
        assert step.reason is Reason.TOO_MANY_ITEMS


def test_11_64_and_1024_tokens_are_one_replay_of_1152() -> None:
    with made((64, 1024, 1152)) as encoder:
        step = agrees(encoder, [Grid(1, 16, 16), Grid(1, 64, 64)])
        assert isinstance(step, Replay)
        assert step.capacity.tokens == 1152
        assert encoder.report().replays == {"vision": {1152: 1}}


def test_12_an_image_between_two_tile_budgets_takes_the_upper() -> None:
    with made((16, 32), "internvl") as encoder:
        step = agrees(encoder, [Grid(1, 1, 1)] * 5)
        assert isinstance(step, Replay)
        assert step.capacity.tokens == 32


def test_13_a_budget_that_runs_out_of_memory_is_dropped_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stock = Qwen25VL.forward

    def short_of_memory(self: Qwen25VL, path: str, buffers: Any, bounds: Any) -> Any:
        if len(buffers.window_index) == 80 and isinstance(buffers.pixels, torch._subclasses.FakeTensor):
            raise torch.OutOfMemoryError("no memory for 80")
        return stock(self, path, buffers, bounds)

    monkeypatch.setattr(Qwen25VL, "forward", short_of_memory)
    with made((64, 80, 128)) as encoder:
        assert encoder.report().capture.dropped == {"vision": (80,)}
        assert "budget 80 is dropped, its capture failed: OutOfMemoryError: no memory for 80" in caplog.text
        step = agrees(encoder, [Grid(1, 4, 2 * 39)])
        assert isinstance(step, Replay)
        assert step.capacity.tokens == 128


def test_14_padding_is_bounded_by_the_grid_and_reported() -> None:
    with Encoder.from_preset(tiny_preset("qwen2_5_vl"), config=EncoderCudaGraphConfig(max_token_budget=256)) as encoder:
        agrees(encoder, [Grid(1, 10, 26)])
        report = encoder.report()
        assert report.replays == {"vision": {80: 1}}
        assert report.padding_tokens == 15
        assert report.padding_fraction == 15 / 80


def test_15_36_budgets_take_the_buffers_of_the_largest_alone() -> None:
    options = {"backend": "auto"}  # traced on first use: buffers are what counts here
    sizes = []
    for config in (EncoderCudaGraphConfig(**options), EncoderCudaGraphConfig(token_budgets=(5120,), **options)):  # type: ignore[arg-type]
        with Encoder.from_preset(tiny_preset("qwen2_5_vl"), config=config) as encoder:
            capture = encoder.report().capture
            sizes.append((len(capture.budgets["vision"]), capture.static_bytes))
    (many, all_bytes), (one, largest_bytes) = sizes
    assert (many, one) == (36, 1)
    assert all_bytes <= 1.1 * largest_bytes
