"""`onereplay check` passes for every registered model on the traced back end, and can fail."""

import pytest
import torch

from onereplay.checking import Checks
from onereplay.encoder import Encoder


def test_every_claim_of_the_self_test_holds(encoder: Encoder) -> None:
    failed = [result for result in Checks(encoder).run(lambda claim: None) if not result.passed]
    assert not failed


def test_results_have_the_rows_and_the_width_that_items_and_adapter_announce(encoder: Encoder) -> None:
    """Ranks of a data-parallel encoder make room for each other's results by it."""
    adapter = encoder.adapter
    path = next(iter(adapter.paths()))
    grids = next(found[-1][1] for count in (2, 3) if (found := adapter.layouts(path, count * adapter.unit(path), 2)))
    batch = adapter.batch(**adapter.example_inputs(grids, torch.Generator().manual_seed(0)))
    features = encoder.manager.encode(batch)
    assert [rows.shape[0] for rows in features] == [item.num_rows for item in batch.items]
    assert {tuple(rows.shape[1:]) for rows in features} == {adapter.result_shape}


def test_a_wrong_output_row_fails_the_claims(qwen: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = qwen.manager.encode
    monkeypatch.setattr(
        qwen.manager, "encode", lambda batch: [torch.cat([rows[:-1], rows[-1:] * 1.001]) for rows in encode(batch)]
    )
    failed = [result for result in Checks(qwen).run(lambda claim: None) if not result.passed]
    assert len(failed) > 10
