"""Nearest positions in a table, against transformers and by hand. Integers: every comparison is exact."""

import numpy as np
import pytest
import torch
from transformers.vision_utils import get_vision_nearest_position_ids

from onereplay.geometry import Grid, nearest_positions


@pytest.mark.parametrize("side", [4, 8, 16, 24, 32, 64, 70])
def test_positions_are_those_of_transformers_on_a_cpu(side: int) -> None:
    """Ties between `i / h` and `k / side` depend on rounding; these are the sides of published towers."""
    for count in range(1, 200):
        grid = Grid(1, count, count % 7 + 1)
        expected = get_vision_nearest_position_ids(torch.tensor([grid[1:]]), side)
        np.testing.assert_array_equal(nearest_positions(grid, side), expected.numpy())


def test_a_grid_of_the_table_itself_takes_every_entry_in_order() -> None:
    assert nearest_positions(Grid(1, 6, 6), 6).tolist() == list(range(36))


def test_two_rows_take_the_first_and_the_middle_of_the_table_and_frames_repeat() -> None:
    assert nearest_positions(Grid(2, 2, 1), 8).tolist() == [0, 32] * 2
