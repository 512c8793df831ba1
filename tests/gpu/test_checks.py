"""`onereplay check` passes on the device: every claim, on both back ends, for tiny models and for published sizes."""

import pytest

from onereplay import EncoderCudaGraphConfig
from onereplay.checking import CheckResult, Checks, check_model
from onereplay.encoder import Encoder
from onereplay.errors import UnsupportedModelError
from tests.adapters.conftest import tiny_preset
from tests.gpu.conftest import EVERY, FULL, MODELS, TINY, made


def failed(results: list[CheckResult]) -> list[CheckResult]:
    assert len(results) > 8
    return [result for result in results if not result.passed]


@pytest.mark.parametrize("model_type", EVERY)
def test_every_claim_holds_for_a_tiny_model_under_cuda_graphs(model_type: str) -> None:
    try:
        encoder = made(model_type, preset=tiny_preset(model_type))
    except UnsupportedModelError as error:
        if "transformers" not in str(error):
            raise
        pytest.skip(str(error))
    with encoder:
        assert not failed(list(Checks(encoder).run(lambda claim: None)))


@pytest.mark.parametrize("model_type", MODELS)
def test_every_claim_holds_for_a_tiny_model_on_the_traced_back_end(model_type: str) -> None:
    config = EncoderCudaGraphConfig(token_budgets=(64, 128), backend="traced")
    with Encoder.from_preset(TINY[model_type], device="cuda", config=config) as encoder:
        assert encoder.report().capture.backend == "traced"
        assert not failed(list(Checks(encoder).run(lambda claim: None)))


@pytest.mark.parametrize("model_type", MODELS)
def test_every_claim_holds_for_a_published_size_as_a_user_gets_it(model_type: str) -> None:
    """With every rewrite, compiled blocks among them. InternVL3 has 256 tokens a tile."""
    budgets = (256, 1024) if model_type == "internvl" else (64, 1024)
    assert not failed(check_model(f"preset:{FULL[model_type]}", device="cuda", backend="cuda", budgets=budgets))
