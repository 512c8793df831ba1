"""`accelerate`: a whole transformers model generates the same tokens, keeps its types, and is given back as it was.

Tolerance of features: the fp32 rule of `onereplay.checking`, 1e-5 of the largest reference value. Tokens are compared
exactly: with random weights the first and second logit are far further apart than 1e-5.
"""

import copy
import functools
import inspect
import itertools
import logging
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from onereplay import EncoderCudaGraphConfig
from onereplay.acceleration import Accelerated, accelerate
from onereplay.adapters import ADAPTERS, adapter_for
from onereplay.checking import FP32_TOLERANCE
from onereplay.core.plan import Reason
from onereplay.errors import ConfigError, InputError, OnereplayError, UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_
from onereplay.presets import get_preset, hf_config
from tests.adapters.conftest import tiny_preset

CONFIG = EncoderCudaGraphConfig(token_budgets=(64, 432))
"""Traced on first use. The second is for models whose three smallest images do not fit the first."""
TEXT, START, END, IMAGE, VIDEO = 7, 60, 61, 62, 63
"""Token ids of the presets' stand-in vocabulary."""


# ------------------------------------------------------------------ helpers


def whole_model(model_type: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny `...ForConditionalGeneration`; every weight is drawn from the seed."""
    model = AutoModelForImageTextToText.from_config(hf_config(get_preset(tiny_preset(model_type))), dtype=dtype).eval()
    random_weights_(model, tuple(name for name, _ in model.named_children()), seed)
    return model


def pixel_inputs(model: Any, grids: Sequence[Grid] | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Random pixels and sizes of several images, under the names of the stock entry point."""
    adapter = adapter_for(model)
    m = getattr(adapter, "merge", 1)
    grids = grids or (
        [Grid(1, 2 * m, 3 * m), Grid(1, 4 * m, 4 * m), Grid(1, m, m)]
        if adapter.engine == "packed"
        else [Grid(1, 0, 0) if adapter.engine == "multi-path" else Grid(1, 1, 1)] * 3
    )
    return adapter.example_inputs(grids, torch.Generator().manual_seed(seed))


def prompt(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs with a prompt of text around the placeholders of every image, then of every video."""
    adapter = adapter_for(model)
    ids = [5, 6]
    for item in adapter.batch(**inputs).items:
        placeholder = IMAGE if item.modality.value == "image" else VIDEO
        ids += [START, *[placeholder] * item.num_rows, END, TEXT]
    input_ids = torch.tensor([ids])
    found = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **inputs}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        found["mm_token_type_ids"] = (input_ids == IMAGE).int() + 2 * (input_ids == VIDEO).int()
    return found


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> list[int]:
    given = prompt(model, inputs)
    device = next(model.parameters()).device
    ids = model.generate(
        **{name: value.to(device) for name, value in given.items()},
        **{"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **options},
    )
    tokens: list[int] = ids[0, given["input_ids"].shape[1] :].tolist()
    return tokens


def rows_of(output: Any) -> Tensor:
    """All rows of an output, whatever the type of its `pooler_output`."""
    return torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in pooled(output)])


def pooled(output: Any) -> Any:
    """`pooler_output`, or what the model goes on with where there is none (Llama 4)."""
    return output.last_hidden_state if output.pooler_output is None else output.pooler_output


def base_of(model: Any) -> Any:
    """The model that has the entry points: the base model where there is one."""
    return adapter_for(model).model


def entry(model: Any) -> Any:
    """The outer class if it passes the entry points on (DeepSeek-VL's does not), else the base model."""
    return model if hasattr(model, "get_image_features") else base_of(model)


def of_stock(call: Callable[[], Any]) -> Any:
    """What the stock model gives; a test is skipped where it fails by itself: the Llama 4 of transformers 5.24 reads a
    field that its language model's output lacks."""
    try:
        return call()
    except (AttributeError, IndexError) as error:
        pytest.skip(f"this transformers cannot do it: {error!r}")


def features(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    """`get_image_features` of the inputs, or `get_video_features` where they are a video's."""
    kind = "video" if "pixel_values_videos" in inputs else "image"
    with torch.no_grad():
        return getattr(entry(model), f"get_{kind}_features")(**inputs, **options)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max().clamp(min=1)


def num_replays(handle: Accelerated) -> int:
    return sum(sum(counts.values()) for counts in handle.report().replays.values())


def num_eager(handle: Accelerated) -> dict[str, int]:
    """By reason; of the path that every item uses."""
    return next(iter(handle.report().eager.values()))


def generates(model_type: str) -> bool:
    """Whether transformers has a whole model around this encoder; towers, and models of our own, have none."""
    config = hf_config(get_preset(tiny_preset(model_type)))
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


FEW = ("deepseek_ocr2", "gemma4", "internvl", "lfm2_vl", "llama4", "qwen2_5_vl", "qwen3_vl")
"""Every engine, and every way to give features: lists, tuples, tensors, deepstack levels, unprojected."""
EVERY_MODEL = {
    "test_generate_gives_the_same_tokens_and_the_encoder_was_replayed",
    "test_features_keep_their_type_shapes_and_values",
    "test_the_signature_stays",
    "test_restore_gives_the_stock_methods_and_bits_back",
}
"""What could differ from model to model; the rest is `acceleration.py`'s own doing and is tested with a few."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        names = filter(generates, ADAPTERS) if metafunc.function.__name__ in EVERY_MODEL else FEW
        metafunc.parametrize("model_type", sorted(names), scope="module", indirect=True)


@pytest.fixture(scope="module")
def model_type(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def stock(model_type: str) -> Any:
    """Never accelerated: what is expected comes from it."""
    return whole_model(model_type)


@pytest.fixture(scope="module")
def shared(model_type: str) -> Iterator[tuple[Any, Accelerated]]:
    """A model of the same weights, accelerated; for tests that leave it as it is."""
    model = whole_model(model_type)
    with accelerate(model, CONFIG) as handle:
        yield model, handle


# ------------------------------------------------------------------ generate


def test_generate_gives_the_same_tokens_and_the_encoder_was_replayed(
    stock: Any, shared: tuple[Any, Accelerated]
) -> None:
    model, handle = shared
    inputs = pixel_inputs(stock)
    expected = of_stock(lambda: generate(stock, inputs))
    before = num_replays(handle), handle.report().items
    assert generate(model, inputs) == expected
    assert (num_replays(handle), handle.report().items) == (before[0] + 1, before[1] + 3)


def test_beams_and_a_text_of_no_pictures_give_the_same_tokens(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    model, handle = shared
    inputs = pixel_inputs(stock)
    of_stock(lambda: generate(stock, inputs))
    assert generate(model, inputs, num_beams=3) == generate(stock, inputs, num_beams=3)
    before = handle.report()
    text = torch.tensor([[5, 6, TEXT]])
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(text)
    assert torch.equal(
        model.generate(input_ids=text, attention_mask=mask, **options),
        stock.generate(input_ids=text, attention_mask=mask, **options),
    )
    assert handle.report() == before


def test_a_batch_over_the_largest_budget_runs_eagerly_and_gives_the_same_tokens(model_type: str, stock: Any) -> None:
    model = whole_model(model_type)
    inputs = pixel_inputs(stock)
    expected = of_stock(lambda: generate(stock, inputs))
    with accelerate(model, EncoderCudaGraphConfig(token_budgets=(8,))) as handle:
        assert generate(model, inputs) == expected
        assert sum(num_eager(handle).values()) == 1
        assert num_replays(handle) == 0


def test_generate_with_images_and_a_video_gives_the_same_tokens() -> None:
    stock, model = whole_model("qwen2_5_vl"), whole_model("qwen2_5_vl")
    inputs = pixel_inputs(stock, [Grid(1, 4, 6), Grid(3, 4, 4), Grid(1, 2, 2)])
    assert {"pixel_values", "pixel_values_videos"} <= inputs.keys()
    with accelerate(model, CONFIG) as handle:
        assert generate(model, inputs) == generate(stock, inputs)
        assert (num_replays(handle), handle.report().items) == (2, 3)
        assert num_eager(handle) == {}


def test_the_logits_of_a_forward_are_those_of_the_stock_model(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    model, _ = shared
    given, other = (prompt(stock, pixel_inputs(stock, seed=seed)) for seed in (0, 1))
    with torch.no_grad():
        expected = of_stock(lambda: stock(**given).logits)
        found = model(**given).logits
        assert_close(found, expected)
        difference = (found - model(**other).logits).abs().max()
    assert difference > 0.1 * found.abs().max(), "what is generated depends on the pictures"


# ------------------------------------------------------------------ types and parameters


def test_features_keep_their_type_shapes_and_values(
    model_type: str, stock: Any, shared: tuple[Any, Accelerated]
) -> None:
    model, handle = shared
    inputs = pixel_inputs(stock)
    before = num_replays(handle)
    found, expected = features(base_of(model), inputs), features(base_of(stock), inputs)
    assert num_replays(handle) == before + 1
    assert isinstance(found, BaseModelOutputWithPooling)
    assert type(pooled(found)) is type(pooled(expected))
    assert [rows.shape for rows in pooled(found)] == [rows.shape for rows in pooled(expected)]
    assert_close(rows_of(found), rows_of(expected))
    assert {rows.dtype for rows in pooled(found)} == {torch.float32}


def test_video_features_keep_their_type_shapes_and_values() -> None:
    stock, model = whole_model("qwen2_5_vl"), whole_model("qwen2_5_vl")
    inputs = pixel_inputs(stock, [Grid(3, 4, 4), Grid(2, 4, 6)])
    with accelerate(model, CONFIG) as handle:
        found, expected = features(model, inputs), features(stock, inputs)
        assert num_replays(handle) == 1
        assert {type(found.pooler_output), type(expected.pooler_output)} == {tuple}
        assert [rows.shape for rows in found.pooler_output] == [rows.shape for rows in expected.pooler_output]
        assert_close(rows_of(found), rows_of(expected))


def test_through_the_outer_class_too(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    model, handle = shared
    inputs = pixel_inputs(stock)
    before = num_replays(handle)
    assert_close(rows_of(features(model, inputs)), rows_of(features(stock, inputs)))
    assert num_replays(handle) == before + 1


def test_the_base_model_alone_can_be_accelerated(model_type: str, stock: Any) -> None:
    model = whole_model(model_type)
    inputs = pixel_inputs(stock)
    with accelerate(base_of(model), CONFIG) as handle:
        assert_close(rows_of(features(model, inputs)), rows_of(features(stock, inputs)))
        assert num_replays(handle) == 1


def test_positional_and_keyword_arguments_serve_alike(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    model, handle = shared
    inputs = pixel_inputs(stock)
    names = [name for name in adapter_for(stock).entry_points["get_image_features"] if name in inputs]
    values = [inputs[name] for name in names]
    expected = rows_of(features(model, inputs))
    before, calls = num_replays(handle), 0
    for owner in (entry(model), base_of(model)):
        order = inspect.signature(owner.get_image_features).parameters
        leading = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(order, names, strict=False)))
        for count in range(leading + 1):
            rest = dict(zip(names[count:], values[count:], strict=True))
            with torch.no_grad():
                assert torch.equal(rows_of(owner.get_image_features(*values[:count], **rest)), expected)
            calls += 1
    assert num_replays(handle) == before + calls >= before + 4


def test_the_signature_stays(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    model, handle = shared
    for name in handle.adapter.entry_points:
        replaced, plain = getattr(base_of(model), name), getattr(base_of(stock), name)
        assert inspect.signature(replaced) == inspect.signature(plain)
        assert replaced.__name__ == plain.__name__


@pytest.mark.parametrize("option", [{"return_dict": True}, {"output_hidden_states": False}, {"return_dict": None}])
def test_options_that_ask_for_nothing_more_are_replayed(
    stock: Any, shared: tuple[Any, Accelerated], option: dict[str, Any]
) -> None:
    model, handle = shared
    inputs = pixel_inputs(stock)
    before = num_replays(handle)
    assert_close(rows_of(features(model, inputs, **option)), rows_of(features(stock, inputs)))
    assert num_replays(handle) == before + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_pixels_of_another_dtype_are_converted_as_before(
    model_type: str, stock: Any, shared: tuple[Any, Accelerated], dtype: torch.dtype
) -> None:
    """transformers converts them to the tower's dtype (LFM2-VL: in its patch embedding)."""
    model, _ = shared
    inputs = pixel_inputs(stock)
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    try:
        expected = features(stock, inputs)
    except RuntimeError:
        pytest.skip("transformers does not convert the pixels of this model")
    found = features(model, inputs)
    assert_close(rows_of(found), rows_of(expected))
    assert rows_of(found).dtype == rows_of(expected).dtype


def test_sizes_may_be_of_another_integer_type(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    model, _ = shared
    inputs = pixel_inputs(stock)
    table = next((name for name in ("image_grid_thw", "spatial_shapes") if name in inputs), None)
    if table is None:
        pytest.skip("a model of tiles has no table of sizes")
    assert inputs[table].dtype == torch.int64
    expected = rows_of(features(model, inputs))
    assert torch.equal(rows_of(features(model, {**inputs, table: inputs[table].int()})), expected)


def test_results_are_the_callers_own(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    model, handle = shared
    first = rows_of(features(model, pixel_inputs(stock)))
    kept = first.clone()
    output = pooled(features(model, pixel_inputs(stock, seed=1)))
    assert not any(handle.manager.owns(rows) for rows in output)
    for rows in output:
        rows.fill_(torch.nan)
    assert torch.equal(first, kept)
    assert torch.equal(rows_of(features(model, pixel_inputs(stock))), kept)


def test_pixels_that_do_not_fit_their_sizes_are_an_input_error(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    model, _ = shared
    inputs = pixel_inputs(stock)
    with pytest.raises(InputError, match=r"pixel_values has shape|needs a square"):
        features(model, {**inputs, "pixel_values": inputs["pixel_values"][..., :-1, :-1]})


# ------------------------------------------------------------------ calls that need the stock method


STOCK_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"return_dict": False}, "return_dict=False"),
    ({"output_hidden_states": True}, "output_hidden_states=True"),
    ({"output_attentions": True}, "output_attentions=True"),
]


def logged_reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "an eager forward" in record.getMessage()]


@pytest.mark.parametrize(("options", "why"), STOCK_CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_call_that_asks_for_more_is_the_stock_call_counted_and_logged_once(
    model_type: str, stock: Any, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = whole_model(model_type)
    inputs = pixel_inputs(stock)
    for each in (model, stock):
        if "output_attentions" in options:
            each.set_attn_implementation("eager")
    try:
        with accelerate(model, CONFIG) as handle:
            for _ in range(2):
                # The base model's method: a head's may keep `return_dict` to itself (Mistral 3).
                expected = of_stock(lambda: features(base_of(stock), inputs, **options))
                assert_same_output(features(base_of(model), inputs, **options), expected)
            assert num_eager(handle) == {Reason.UNSUPPORTED_INPUT.value: 2}
            assert num_replays(handle) == 0
            lines = logged_reasons(caplog)
            assert len(lines) == len(handle.adapter.paths())
            assert all(why in line for line in lines)
    finally:
        stock.set_attn_implementation("sdpa")


def assert_same_output(found: Any, expected: Any) -> None:
    """Bit for bit, through tuples and output objects."""
    assert type(found) is type(expected)
    if isinstance(found, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(found, dict):
        assert list(found) == list(expected)
        assert_same_output(list(found.values()), list(expected.values()))
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_output(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("options", [{"vision_feature_layer": -2}, {"vision_feature_select_strategy": "full"}], ids=str)
def test_another_feature_layer_or_strategy_is_the_stock_call(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, stock = whole_model("internvl"), whole_model("internvl")
    inputs = pixel_inputs(stock)
    with accelerate(model, CONFIG) as handle:
        if "vision_feature_layer" in options:
            assert_same_output(features(model, inputs, **options), features(stock, inputs, **options))
        else:  # 17 rows are no square: the stock method cannot do it either, and it is the stock method that says so
            with pytest.raises(RuntimeError, match="shape"):
                features(model, inputs, **options)
        assert num_eager(handle) == {Reason.UNSUPPORTED_INPUT.value: 1}
        assert next(iter(options)) in logged_reasons(caplog)[0]
        same = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
        assert_close(rows_of(features(model, inputs, **same)), rows_of(features(stock, inputs)))
        assert num_replays(handle) == 1


def test_another_feature_layer_in_the_configuration_is_refused_never_ignored() -> None:
    model = whole_model("internvl")
    model.config.vision_feature_layer = model.model.config.vision_feature_layer = -2
    with pytest.raises(UnsupportedModelError, match="internvl with vision_feature_layer=-2"):
        accelerate(model, CONFIG)


def test_in_training_with_gradients_the_stock_method_trains(
    model_type: str, stock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = whole_model(model_type).train()
    inputs = pixel_inputs(stock)
    with accelerate(model, CONFIG) as handle:
        rows_of(entry(model).get_image_features(**inputs)).square().sum().backward()
        gradient = handle.adapter.weight.grad
        assert gradient is not None
        assert gradient.abs().max() > 0
        assert num_eager(handle) == {Reason.UNSUPPORTED_INPUT.value: 1}
        assert "the model is in training mode" in logged_reasons(caplog)[0]
        with torch.no_grad():
            assert_close(rows_of(entry(model).get_image_features(**inputs)), rows_of(features(stock, inputs)))
        assert num_replays(handle) == 1


def test_a_gradient_of_the_pixels_is_not_cut_off(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    """In eval mode too: features without a gradient would make saliency maps and attacks silently zero or fail."""
    model, _ = shared
    inputs = pixel_inputs(stock)
    inputs["pixel_values"].requires_grad_()
    output = entry(model).get_image_features(**inputs)
    assert rows_of(output).requires_grad


def test_metadata_of_the_callers_own_is_the_stock_call() -> None:
    model, stock = whole_model("qwen2_5_vl"), whole_model("qwen2_5_vl")
    inputs = pixel_inputs(stock)
    own = {"image_max_seqlen": 64}
    with accelerate(model, CONFIG) as handle:
        try:
            expected = features(stock, inputs, **own)
        except (TypeError, ValueError):
            pytest.skip("this transformers takes no metadata of the caller's")
        assert_same_output(features(model, inputs, **own), expected)
        assert num_eager(handle) == {Reason.UNSUPPORTED_INPUT.value: 1}


# ------------------------------------------------------------------ restore


def assert_stock(model: Any) -> None:
    """The methods are the class's again, and nothing is left on the instance."""
    base = base_of(model)
    assert not [name for name in vars(base) if "onereplay" in name]
    for name in adapter_for(model).entry_points:
        assert name not in vars(base)
        assert getattr(base, name).__func__ is getattr(type(base), name)


def test_restore_gives_the_stock_methods_and_bits_back(model_type: str, stock: Any) -> None:
    model = whole_model(model_type)
    inputs = pixel_inputs(stock)
    expected = features(model, inputs)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    implementation = model.config.vision_config._attn_implementation
    handle = accelerate(model, CONFIG)
    features(model, inputs)
    handle.restore()
    assert_stock(model)
    assert_same_output(features(model, inputs), expected)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.config.vision_config._attn_implementation == implementation
    assert num_replays(handle) == 1, "the report outlives the graphs"


def test_after_restore_the_model_can_be_copied_pickled_and_saved(model_type: str, stock: Any, tmp_path: Path) -> None:
    model = whole_model(model_type)
    inputs = pixel_inputs(stock)
    expected = features(stock, inputs)
    with accelerate(model, CONFIG):
        features(model, inputs)
    assert_same_output(features(copy.deepcopy(model), inputs), expected)
    assert_same_output(features(pickle.loads(pickle.dumps(model)), inputs), expected)
    model.save_pretrained(tmp_path)
    assert_same_model(AutoModelForImageTextToText.from_pretrained(tmp_path).eval(), stock)


def test_meanwhile_the_model_can_be_saved(model_type: str, stock: Any, tmp_path: Path) -> None:
    model = whole_model(model_type)
    with accelerate(model, CONFIG):
        model.save_pretrained(tmp_path)
    assert_same_model(AutoModelForImageTextToText.from_pretrained(tmp_path).eval(), stock)


def assert_same_model(saved: Any, stock: Any) -> None:
    """The same weights bit for bit, and their features up to rounding: a file's weights may lie at odd addresses, where
    PyTorch takes other kernels."""
    weights, expected = saved.state_dict(), stock.state_dict()
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    inputs = pixel_inputs(stock)
    assert_close(rows_of(features(saved, inputs)), rows_of(features(stock, inputs)))


def test_a_deep_copy_taken_meanwhile_never_answers_with_the_originals_weights(model_type: str, stock: Any) -> None:
    """Copies are taken for moving averages and as references; then their weights go other ways."""
    model = whole_model(model_type)
    inputs = pixel_inputs(stock)
    with accelerate(model, CONFIG):
        other = copy.deepcopy(model)
        random_weights_(base_of(other), adapter_for(other).parts, seed=1)
        expected = whole_model(model_type)
        random_weights_(base_of(expected), adapter_for(expected).parts, seed=1)
        assert_close(rows_of(features(other, inputs)), rows_of(features(expected, inputs)))


def test_restoring_again_does_nothing_not_even_to_a_later_handle(model_type: str, stock: Any) -> None:
    model = whole_model(model_type)
    first = accelerate(model, CONFIG)
    first.restore()
    first.restore()
    assert_stock(model)
    with accelerate(model, CONFIG) as second:
        first.restore()
        inputs = pixel_inputs(stock)
        assert_close(rows_of(features(model, inputs)), rows_of(features(stock, inputs)))
        assert num_replays(second) == 1
    assert_stock(model)


def test_accelerating_twice_is_an_error_and_the_first_handle_works_on(model_type: str, stock: Any) -> None:
    model = whole_model(model_type)
    with accelerate(model, CONFIG) as handle:
        for again in (model, base_of(model)):
            with pytest.raises(OnereplayError, match=r"accelerated already; call restore\(\) on the first handle"):
                accelerate(again, CONFIG)
        inputs = pixel_inputs(stock)
        assert_close(rows_of(features(model, inputs)), rows_of(features(stock, inputs)))
        assert num_replays(handle) == 1
    assert_stock(model)


def test_an_exception_inside_the_block_restores(model_type: str, stock: Any) -> None:
    model = whole_model(model_type)

    def fail_inside() -> None:
        with accelerate(model, CONFIG):
            features(model, {"nonsense": torch.zeros(1)})

    with pytest.raises(TypeError):
        fail_inside()
    assert_stock(model)
    inputs = pixel_inputs(stock)
    assert_same_output(features(model, inputs), features(stock, inputs))


def test_an_exception_inside_a_call_leaves_the_handle_working(model_type: str, stock: Any) -> None:
    model = whole_model(model_type)
    inputs = pixel_inputs(stock)
    with accelerate(model, CONFIG) as handle:
        with pytest.raises(InputError):
            features(model, {**inputs, "pixel_values": inputs["pixel_values"][..., :-1, :-1]})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(handle.adapter, "assemble", lambda rows, batch: (_ for _ in ()).throw(KeyError("x")))
            with pytest.raises(KeyError):
                features(model, inputs)
        assert_close(rows_of(features(model, inputs)), rows_of(features(stock, inputs)))
    assert_stock(model)


def test_a_method_that_the_user_put_on_the_model_is_given_back(model_type: str) -> None:
    model = whole_model(model_type)
    stock_method = base_of(model).get_image_features

    @functools.wraps(stock_method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        return stock_method(*args, **kwargs)

    base_of(model).get_image_features = counted
    with accelerate(model, CONFIG):
        pass
    assert vars(base_of(model)).get("get_image_features") is counted


def test_refused_options_leave_the_model_as_it_was(model_type: str) -> None:
    model = whole_model(model_type)
    bad: list[Callable[[], Any]] = [
        lambda: accelerate(model, EncoderCudaGraphConfig(backend="cuda")),
        lambda: accelerate(model, EncoderCudaGraphConfig(attention="fa2")),
    ]
    for call in bad:
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            call()
    assert_stock(model)


def test_a_model_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no adapter for model type 'Linear'"):
        accelerate(torch.nn.Linear(1, 1))


# ------------------------------------------------------------------ two models


def test_two_models_at_once_each_answer_with_their_own_weights(model_type: str, stock: Any) -> None:
    first, second = whole_model(model_type), whole_model(model_type, seed=1)
    inputs = pixel_inputs(stock)
    expected = rows_of(features(second, inputs))
    with accelerate(first, CONFIG) as one, accelerate(second, CONFIG) as two:
        for _ in range(2):
            assert_close(rows_of(features(first, inputs)), rows_of(features(stock, inputs)))
            assert_close(rows_of(features(second, inputs)), expected)
        assert (num_replays(one), num_replays(two)) == (2, 2)
        one.restore()
        assert_close(rows_of(features(second, inputs)), expected)
        assert_stock(first)


def test_the_report_prints_what_was_done(stock: Any, shared: tuple[Any, Accelerated]) -> None:
    model, handle = shared
    features(model, pixel_inputs(stock))
    text = str(handle.report())
    assert "replays (" in text
    assert re.search(r"captured \w+: 2 budgets to \d+.* \(traced\)", text)


def test_capturing_says_one_line(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onereplay"), accelerate(whole_model(model_type), CONFIG):
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("captured")]
    assert len(lines) == 1
