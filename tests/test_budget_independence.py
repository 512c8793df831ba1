"""What an item gives does not depend on what else is in its batch, nor on the budget that the batch lands in.

Tolerance: float32, sums in another order; see `onereplay.checking`. On a GPU the same is held to the rounding of
bfloat16 (`tests/gpu/test_budgets.py`).
"""

import pytest
import torch

from onereplay import Encoder, EncoderCudaGraphConfig
from onereplay.checking import FP32_TOLERANCE
from onereplay.geometry import Grid

ITEM = {
    "qwen2_5_vl-7b@tiny": Grid(1, 8, 8),
    "lfm2_vl-450m@tiny": Grid(1, 8, 8),
    "internvl3-8b@tiny": Grid(1, 1, 1),
}
OTHERS = (0, 3, 17, 70)
"""Items beside it: its batches go to several budgets, and the last is eager."""


@pytest.mark.parametrize("preset", sorted(ITEM))
def test_an_item_is_the_same_whatever_else_is_in_its_batch(preset: str) -> None:
    grid, found, steps = ITEM[preset], [], set()
    config = EncoderCudaGraphConfig(token_budgets=(64, 80, 128, 256), backend="traced")
    with Encoder.from_preset(preset, device="cpu", config=config) as encoder:

        def inputs(count: int) -> dict[str, torch.Tensor]:
            return dict(encoder.adapter.example_inputs([grid] * count, torch.Generator().manual_seed(0)))

        whole = inputs(1 + max(OTHERS))
        for others in OTHERS:
            batch = inputs(1 + others)
            batch["pixel_values"] = whole["pixel_values"][: len(batch["pixel_values"])]
            found.append(encoder.encode_inputs(**batch)[0])
            steps.add(encoder.manager.plan(encoder.adapter.batch(**batch)).steps["vision"])
    assert len(steps) >= 3
    for rows in found[1:]:
        assert (rows - found[0]).abs().max() <= FP32_TOLERANCE * found[0].abs().max().clamp(min=1)
