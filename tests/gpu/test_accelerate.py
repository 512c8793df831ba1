"""`accelerate` on the device: the same tokens as the stock model in bf16, the same types, and the model given back."""

from typing import Any

import pytest
import torch

from onereplay import EncoderCudaGraphConfig
from onereplay.acceleration import accelerate
from onereplay.adapters import adapter_for
from onereplay.checking import HALF_RATIO
from onereplay.core.plan import Reason
from onereplay.geometry import Grid
from tests.gpu.conftest import MODELS, NOT_COMPILED, relative_error
from tests.test_accelerate import assert_stock, features, pixel_inputs, pooled, prompt, rows_of, whole_model

CONFIG = EncoderCudaGraphConfig(token_budgets=(64,), backend="cuda", optimize=NOT_COMPILED)
TIE = 2**-5
"""Greedy decoding may part from the stock model's where two logits are as near as this share of the largest: features
differ by bf16 rounding (8 bits), and some layers of the language model lie in between."""


def bf16_model(model_type: str) -> Any:
    return whole_model(model_type, dtype=torch.bfloat16).to("cuda")


def on_device(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("cuda") for name, value in inputs.items()}


def assert_same_tokens(model: Any, stock: Any, inputs: dict[str, Any]) -> None:
    """The same tokens up to the first tie."""
    given = on_device(prompt(stock, inputs))
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    found, expected = model.generate(**given, **options), stock.generate(**given, **options)
    start = given["input_ids"].shape[1]
    for ours, theirs, logits in zip(
        found.sequences[0, start:].tolist(), expected.sequences[0, start:].tolist(), expected.logits, strict=True
    ):
        if ours != theirs:
            gap = float((logits[0, theirs] - logits[0, ours]) / logits[0].abs().max())
            assert gap <= TIE, f"token {ours} in place of {theirs}, {gap:.1%} of the largest logit apart"
            return


@pytest.mark.parametrize("model_type", MODELS)
def test_generate_gives_the_same_tokens_and_features_are_as_right_as_before(model_type: str) -> None:
    model, stock, exact = bf16_model(model_type), bf16_model(model_type), bf16_model(model_type).float()
    inputs = pixel_inputs(stock)
    with accelerate(model, CONFIG) as handle:
        found = features(model, on_device(inputs))
        expected, reference = features(stock, on_device(inputs)), features(exact, on_device(inputs))
        assert type(pooled(found)) is type(pooled(expected))
        ours, theirs = (relative_error(rows_of(each), rows_of(reference)) for each in (found, expected))
        assert ours <= HALF_RATIO * theirs
        assert_same_tokens(model, stock, inputs)
        report = handle.report()
        assert report.replays == {"vision": {64: 2}}
        assert report.eager == {"vision": {}}
        assert report.capture.backend == "cuda"
    assert_stock(model)
    assert torch.equal(rows_of(features(model, on_device(inputs))), rows_of(expected))


def test_images_and_a_video_give_the_same_tokens() -> None:
    model, stock = bf16_model("qwen2_5_vl"), bf16_model("qwen2_5_vl")
    inputs = pixel_inputs(stock, [Grid(1, 4, 6), Grid(3, 4, 4), Grid(1, 2, 2)])
    with accelerate(model, CONFIG) as handle:
        assert_same_tokens(model, stock, inputs)
        assert handle.report().replays == {"vision": {64: 2}}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_batch_over_the_largest_budget_and_a_call_for_more_work_as_well(model_type: str) -> None:
    model, stock = bf16_model(model_type), bf16_model(model_type)
    inputs = pixel_inputs(stock)
    config = EncoderCudaGraphConfig(token_budgets=(8,), backend="cuda", optimize=NOT_COMPILED)
    with accelerate(model, config) as handle:
        assert_same_tokens(model, stock, inputs)
        more, expected = (features(each, on_device(inputs), return_dict=False) for each in (model, stock))
        assert {type(more), type(expected)} == {tuple}
        counted = handle.report().eager["vision"]
        assert counted.pop(Reason.UNSUPPORTED_INPUT.value) == 1
        assert sum(counted.values()) == 1


def test_sizes_on_the_device_are_read_back_and_right() -> None:
    """Callers move all inputs to the device, `image_grid_thw` too: it waits, and works."""
    model, stock = bf16_model("qwen2_5_vl"), bf16_model("qwen2_5_vl")
    inputs = pixel_inputs(stock)
    with accelerate(model, CONFIG):
        there = rows_of(features(model, on_device(inputs)))
        pixels = {"pixel_values": inputs["pixel_values"].to("cuda"), "image_grid_thw": inputs["image_grid_thw"]}
        assert torch.equal(there, rows_of(features(model, pixels)))
    assert adapter_for(model).device.type == "cuda"
