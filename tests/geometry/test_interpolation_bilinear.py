"""Bilinear taps of one grid, against transformers' own helper and against `interpolate`.

Indices are compared exactly, weights too: both sides do the same float32 operations in the same order.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from onereplay.geometry import Grid, bilinear_taps, merged_positions


@st.composite
def cases(draw: st.DrawFn) -> tuple[Grid, int, int]:
    """A grid, the side of the table and the side of a unit in patches."""
    m = draw(st.integers(1, 3))
    return (
        Grid(draw(st.integers(1, 3)), m * draw(st.integers(1, 40)), m * draw(st.integers(1, 40))),
        draw(st.integers(1, 48)),
        m,
    )


@given(cases())
def test_taps_are_those_of_transformers(case: tuple[Grid, int, int]) -> None:
    grid, side, m = case
    expected, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]), side, mode="bilinear", align_corners=True, spatial_merge_size=m
    )
    found = bilinear_taps(grid, side, m)
    assert found[0].dtype == np.dtype(np.int32)
    assert found[1].dtype == np.dtype(np.float32)
    assert np.array_equal(found[0], expected.numpy())
    assert np.array_equal(found[1], weights.numpy())


@given(cases())
def test_weights_are_not_negative_and_add_up_to_one(case: tuple[Grid, int, int]) -> None:
    """Products of two pairs that each add up to one, rounded: 4 roundings of 6e-8."""
    _, weights = bilinear_taps(*case)
    assert weights.min() >= 0
    assert np.abs(weights.sum(1) - 1).max() < 3e-7


@pytest.mark.parametrize("sides", [(1, 1), (1, 9), (7, 7), (20, 6), (48, 50)])
def test_they_are_interpolate_with_corners_aligned(sides: tuple[int, int]) -> None:
    """Up to rounding in another order: 1e-5 of values of order one."""
    table = torch.randn(7, 7, 5, generator=torch.Generator().manual_seed(0))
    grid = Grid(1, *sides)
    indices, weights = (torch.from_numpy(array) for array in bilinear_taps(grid, 7, 1))
    found = (table.flatten(0, 1)[indices] * weights[..., None]).sum(1).view(*sides, 5)
    expected = torch.nn.functional.interpolate(table.permute(2, 0, 1)[None], sides, mode="bilinear", align_corners=True)
    assert (found - expected[0].permute(1, 2, 0)).abs().max() < 1e-5


def test_a_grid_as_large_as_the_table_takes_the_table_in_merged_order() -> None:
    grid = Grid(2, 6, 6)
    indices, weights = bilinear_taps(grid, 6, 2)
    rows, columns = merged_positions(grid, 2).T
    assert np.array_equal(indices[weights == 1], rows * 6 + columns)
    assert np.count_nonzero(weights) == grid.num_patches
