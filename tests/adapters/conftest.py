"""Tiny encoders, one a registered model, captured once a session on the traced back end."""

from collections.abc import Iterator

import pytest

from onereplay.adapters import ADAPTERS
from onereplay.config import EncoderCudaGraphConfig
from onereplay.encoder import Encoder
from onereplay.errors import UnsupportedModelError
from onereplay.presets import get_preset, hf_config, preset_names

BUDGETS = (64, 128)


def tiny_preset(model_type: str) -> str:
    """The first preset of a model type, small."""
    return next(f"{name}@tiny" for name in preset_names() if get_preset(name).model_type == model_type)


@pytest.fixture(scope="session", params=sorted(ADAPTERS))
def encoder(request: pytest.FixtureRequest) -> Iterator[Encoder]:
    """A tiny random encoder of each registered model that the installed transformers has."""
    name = tiny_preset(request.param)
    config = EncoderCudaGraphConfig(token_budgets=BUDGETS, backend="traced")
    try:
        hf_config(get_preset(name))
        encoder = Encoder.from_preset(name, config=config)
    except UnsupportedModelError as err:
        if "transformers" not in str(err):
            raise
        pytest.skip(str(err))
    with encoder as made:
        yield made


@pytest.fixture(scope="session")
def qwen() -> Iterator[Encoder]:
    """A tiny random Qwen2.5-VL."""
    config = EncoderCudaGraphConfig(token_budgets=BUDGETS, backend="traced")
    with Encoder.from_preset(tiny_preset("qwen2_5_vl"), config=config) as made:
        yield made
