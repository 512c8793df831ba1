"""What an item gives does not depend on the budget that its batch lands in, beyond rounding.

Tolerance: each result errs by at most 1.1 times plain transformers' error against float32 (`onereplay.checking`), so
two of them differ by at most twice that.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from onereplay.checking import HALF_RATIO, plain_features
from onereplay.encoder import Encoder
from onereplay.geometry import Grid
from tests.gpu.conftest import exact_features, inputs_of_grids, made, relative_error

ITEM = {"qwen2_5_vl": Grid(1, 8, 8), "lfm2_vl": Grid(1, 8, 8), "internvl": Grid(1, 1, 1)}
OTHERS = (0, 3, 17, 70)
"""Items beside it: its batches go to several budgets, and the last is eager."""


def first_item(encoder: Encoder, inputs: dict[str, Any]) -> Tensor:
    return encoder.encode_inputs(**inputs)[0]


@pytest.mark.parametrize("model_type", sorted(ITEM))
def test_an_item_is_the_same_up_to_rounding_whatever_else_is_in_its_batch(model_type: str) -> None:
    grid = ITEM[model_type]
    with made(model_type) as encoder:
        (pixels,) = [name for name in inputs_of_grids(encoder, [grid]) if name.startswith("pixel_values")]
        whole = inputs_of_grids(encoder, [grid] * (1 + max(OTHERS)))
        alone = inputs_of_grids(encoder, [grid])
        alone[pixels] = whole[pixels][: len(alone[pixels])]
        found, steps = [], set()
        for others in OTHERS:
            batch = inputs_of_grids(encoder, [grid] * (1 + others))
            batch[pixels] = whole[pixels][: len(batch[pixels])]
            found.append(first_item(encoder, batch).float())
            steps.add(encoder.manager.plan(encoder.adapter.batch(**batch)).steps["vision"])
        assert len(steps) >= 3
        exact = exact_features(encoder, alone)
        allowed = 2 * HALF_RATIO * relative_error(plain_features(encoder.adapter, encoder.adapter.model, alone), exact)
    for one in found:
        for other in found:
            assert float((one - other).norm() / exact.norm()) <= allowed
    assert all(torch.isfinite(rows).all() for rows in found)
