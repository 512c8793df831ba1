"""`onereplay check` passes for every registered model on the traced back end, and can fail."""

import pytest
import torch

from onereplay.checking import Checks
from onereplay.encoder import Encoder


def test_every_claim_of_the_self_test_holds(encoder: Encoder) -> None:
    failed = [result for result in Checks(encoder).run(lambda claim: None) if not result.passed]
    assert not failed


def test_a_wrong_output_row_fails_the_claims(qwen: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = qwen.manager.encode
    monkeypatch.setattr(
        qwen.manager, "encode", lambda batch: [torch.cat([rows[:-1], rows[-1:] * 1.001]) for rows in encode(batch)]
    )
    failed = [result for result in Checks(qwen).run(lambda claim: None) if not result.passed]
    assert len(failed) > 10
