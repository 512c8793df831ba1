"""Indices of spans: every row once, in reading order, delimiters where they belong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onereplay import geometry
from onereplay.geometry import Grid


def test_a_newline_ends_every_row() -> None:
    rows = np.arange(10, 16).reshape(2, 3)
    assert geometry.with_newlines(rows, 7).tolist() == [10, 11, 12, 7, 13, 14, 15, 7]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_tiles_side_by_side_read_like_the_picture_that_was_cut(down: int, across: int, side: int) -> None:
    picture = np.arange(down * side * across * side).reshape(down * side, across * side)
    tiles = [
        picture[side * row : side * (row + 1), side * column : side * (column + 1)].reshape(-1)
        for row in range(down)
        for column in range(across)
    ]
    index = geometry.raster_of_tiles(down, across, side)
    assert np.array_equal(np.concatenate(tiles)[index], picture)


def test_delimiters_stay_and_rows_move() -> None:
    assert geometry.placed(np.array([0, 3, 4, 1, 2]), 100, 3).tolist() == [0, 103, 104, 1, 2]


@pytest.mark.parametrize("grid", [Grid(1, 1, 1), Grid(1, 6, 3), Grid(1, 4, 5), Grid(1, 7, 2), Grid(2, 5, 4)])
def test_a_ragged_gather_is_the_gather_of_the_filled_grid_with_what_is_outside_left_out(grid: Grid) -> None:
    index, inside = geometry.ragged_merge_gather(grid, 3)
    patches = np.arange(1, grid.num_patches + 1).reshape(grid)
    filled = np.pad(patches, ((0, 0), (0, -grid.h % 3), (0, -grid.w % 3))).reshape(-1)
    expected = filled[geometry.merge_gather(Grid(grid.t, grid.h + -grid.h % 3, grid.w + -grid.w % 3), 3)]
    assert np.array_equal(np.where(inside == 1, patches.reshape(-1)[index], 0), expected)
    assert set(np.unique(inside)) <= {0, 1}
    assert index.min() >= 0
    assert index.max() < grid.num_patches


def test_a_ragged_gather_of_whole_squares_is_the_plain_one() -> None:
    index, inside = geometry.ragged_merge_gather(Grid(1, 6, 9), 3)
    assert np.array_equal(index, geometry.merge_gather(Grid(1, 6, 9), 3))
    assert inside.all()
