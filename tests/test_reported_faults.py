"""Faults that a first user found, each as the right behaviour."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onereplay import Encoder, EncoderCudaGraphConfig, accelerate, load_config
from onereplay.adapters import adapter_class
from onereplay.errors import ConfigError, InputError, MediaError
from onereplay.geometry import Grid
from onereplay.loading import random_weights_, vision_model
from onereplay.presets import get_preset, hf_config

CONFIG = EncoderCudaGraphConfig(token_budgets=(64,))


def model_of(name: str, **vision: Any) -> Any:
    config = hf_config(get_preset(name))
    for key, value in vision.items():
        setattr(config.vision_config, key, value)
    parts = adapter_class(config.model_type).parts
    model = vision_model(config, device=torch.device("cpu"), dtype=torch.float32, parts=parts)
    random_weights_(model, parts)
    return model


@pytest.fixture(scope="module")
def qwen() -> Any:
    return model_of("qwen2_5_vl-3b@tiny")


def pixels_of(model: Any) -> dict[str, Any]:
    adapter = adapter_class(model.config.model_type)(model.config)
    return dict(adapter.example_inputs([Grid(1, 8, 8)], torch.Generator().manual_seed(0)))


def test_a_model_in_training_mode_at_capture_gives_the_features_of_evaluation() -> None:
    model = model_of("internvl3-1b@tiny", hidden_dropout_prob=0.5)
    inputs = pixels_of(model)
    with torch.no_grad():
        expected = model.eval().get_image_features(**inputs).pooler_output
        with accelerate(model.train(), CONFIG):
            found = model.eval().get_image_features(**inputs).pooler_output
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_call_with_gradients_enabled_goes_to_the_stock_method_and_is_counted(qwen: Any) -> None:
    qwen.requires_grad_(True)
    try:
        with accelerate(qwen, CONFIG) as handle:
            assert qwen.get_image_features(**pixels_of(qwen)).pooler_output[0].requires_grad
            assert handle.report().eager == {"vision": {"unsupported input": 1}}
    finally:
        qwen.requires_grad_(False)


def test_a_request_through_the_configuration_is_met(qwen: Any) -> None:
    with torch.no_grad(), accelerate(qwen, CONFIG):
        qwen.config.return_dict = False
        try:
            assert isinstance(qwen.get_image_features(**pixels_of(qwen)), tuple)
        finally:
            qwen.config.return_dict = True


def test_a_start_that_fails_leaves_the_weights_as_they_were(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for the static buffers")

    monkeypatch.setattr("onereplay.core.manager.EncoderCudaGraphManager._capture_all", no_memory)
    config = EncoderCudaGraphConfig(token_budgets=(64,), optimize=("aligned_mlp",))
    before = {name: weight.data_ptr() for name, weight in qwen.named_parameters()}
    for start in (accelerate, Encoder):
        with pytest.raises(torch.OutOfMemoryError):
            start(qwen, config)
    assert all(weight.is_contiguous() for weight in qwen.parameters())
    assert before.keys() == dict(qwen.named_parameters()).keys()
    assert "get_image_features" not in vars(qwen)


def test_a_copy_of_an_accelerated_model_can_be_accelerated(qwen: Any) -> None:
    with accelerate(qwen, CONFIG):
        copied = copy.deepcopy(qwen)
    with torch.no_grad(), accelerate(copied, CONFIG) as handle:
        copied.get_image_features(**pixels_of(copied))
        assert handle.report().replays == {"vision": {64: 1}}


def test_an_error_of_a_medium_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(MediaError("a.jpg", "no such file")))
    assert (str(error), error.source, error.reason) == ("a.jpg: no such file", "a.jpg", "no such file")


@pytest.mark.parametrize(
    "wrong",
    [
        {"pixel_values": np.zeros((64, 1176), np.float32)},
        {"pixel_values": [[0.0]]},
        {"image_grid_thw": 5},
        {"image_grid_thw": [1, 8, 8]},
    ],
)
def test_inputs_of_other_types_are_input_errors(qwen: Any, wrong: dict[str, Any]) -> None:
    with Encoder(qwen, CONFIG) as encoder, pytest.raises(InputError):
        encoder.encode_inputs(**{**pixels_of(qwen), **wrong})


def test_one_source_or_an_unknown_policy_is_refused(qwen: Any) -> None:
    with Encoder(qwen, CONFIG) as encoder:
        with pytest.raises(InputError, match="put it in a list"):
            list(encoder.encode_each("photo.jpg"))
        with pytest.raises(ConfigError, match="on_error='ignore' is unknown"):
            encoder.encode([], on_error="ignore")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"\xff\xfe", "is not UTF-8"),
        ("a.toml", b"onereplay = 3", "onereplay is a int"),
        ("a.json", b'{"max_token_budget": 64, "onereplay": {}}', "unknown option max_token_budget"),
    ],
)
def test_a_config_file_that_says_two_things_or_nothing_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(file=tmp_path / name, environment={})
