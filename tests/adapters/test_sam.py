"""SAM's relative positions without an index: bit for bit those of transformers, made anew from the weights."""

import pytest
import torch
from transformers.models.sam.modeling_sam import SamVisionAttention

from onereplay.adapters.sam import relative_positions
from onereplay.errors import InputError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("learned", "size"), [(127, 64), (127, 40), (27, 14), (5, 3), (7, 9), (1, 1)])
def test_they_are_bit_for_bit_those_of_transformers(learned: int, size: int, dtype: torch.dtype) -> None:
    """Learned for the grid, for a larger one (640 pixels through weights for 1,024) and for a smaller one."""
    table = torch.randn(learned, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))
    stock = SamVisionAttention.get_rel_pos(None, size, size, table)
    assert torch.equal(relative_positions(size, size, table), stock)


def test_a_change_of_the_table_shows_in_the_next_call() -> None:
    table = torch.randn(5, 8)
    before = relative_positions(3, 3, table)
    kept = before.clone()
    table.mul_(2)
    assert torch.equal(relative_positions(3, 3, table), 2 * kept)


def test_queries_and_keys_of_two_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="from 3 to 4 rows"):
        relative_positions(3, 4, torch.zeros(7, 8))
