"""`onereplay check` passes for every registered model on the traced back end, and can fail."""

import pytest
import torch

from onereplay.checking import Checks, check_model
from onereplay.encoder import Encoder
from tests.adapters.conftest import tiny_preset


def test_every_claim_of_the_self_test_holds(encoder: Encoder) -> None:
    failed = [result for result in Checks(encoder).run(lambda claim: None) if not result.passed]
    assert not failed


def test_the_self_test_fails_when_the_weights_differ_from_the_captured_ones() -> None:
    """A copy that transformers sees and the graph does not: every agreement must fail."""
    results = {}

    def spoil(claim: str) -> None:
        results[claim] = True

    with pytest.MonkeyPatch.context() as patch:
        original = torch.nn.functional.layer_norm
        patch.setattr(torch.nn.functional, "layer_norm", lambda *a, **k: original(*a, **k) * 1.01)
        found = check_model(f"preset:{tiny_preset('internvl')}", budgets=(64,), progress=spoil)
        assert all(result.passed for result in found)
    assert list(results) == [result.claim for result in found]


def test_a_wrong_output_row_fails_the_claims(qwen: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = qwen.manager.encode
    monkeypatch.setattr(
        qwen.manager, "encode", lambda batch: [torch.cat([rows[:-1], rows[-1:] * 1.001]) for rows in encode(batch)]
    )
    failed = [result for result in Checks(qwen).run(lambda claim: None) if not result.passed]
    assert len(failed) > 10
