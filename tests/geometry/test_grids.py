"""Metadata of one grid, against transformers' own helper and against loops. Integers: every comparison is exact."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from onereplay.geometry import Grid, frame_lengths, merge_gather, merged_positions, raster_positions

merges = st.integers(1, 4)
frames = st.integers(1, 4)
any_grids = st.builds(Grid, frames, st.integers(1, 17), st.integers(1, 17))


@st.composite
def merged_grids(draw: st.DrawFn) -> tuple[Grid, int]:
    """A grid whose height and width are multiples of the merge side, and that side."""
    m = draw(merges)
    units = st.integers(1, 9)
    return Grid(draw(frames), m * draw(units), m * draw(units)), m


@given(any_grids)
def test_a_grid_has_frames_times_rows_times_columns_patches(grid: Grid) -> None:
    assert grid.num_patches == sum(1 for _ in np.ndindex(*grid))


@given(merged_grids())
def test_merged_positions_are_those_of_transformers(case: tuple[Grid, int]) -> None:
    grid, m = case
    expected = get_vision_position_ids(torch.tensor([grid]), m)
    found = merged_positions(grid, m)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, expected.numpy())


@given(merged_grids())
def test_merged_positions_list_the_patches_unit_by_unit(case: tuple[Grid, int]) -> None:
    (t, h, w), m = case
    expected = [
        (row, column)
        for _ in range(t)
        for top in range(0, h, m)
        for left in range(0, w, m)
        for row in range(top, top + m)
        for column in range(left, left + m)
    ]
    np.testing.assert_array_equal(merged_positions(Grid(t, h, w), m), expected)


@pytest.mark.parametrize(("h", "w"), [(3, 4), (4, 3)])
def test_merged_positions_refuse_a_side_that_is_no_multiple_of_the_merge(h: int, w: int) -> None:
    with pytest.raises(ValueError, match="reshape"):
        merged_positions(Grid(1, h, w), 2)


@given(any_grids)
def test_raster_positions_list_the_patches_row_by_row_in_every_frame(grid: Grid) -> None:
    expected = [(row, column) for _ in range(grid.t) for row in range(grid.h) for column in range(grid.w)]
    found = raster_positions(grid)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, expected)


@given(any_grids)
def test_raster_positions_are_those_of_transformers_without_a_merge(grid: Grid) -> None:
    np.testing.assert_array_equal(raster_positions(grid), get_vision_position_ids(torch.tensor([grid]), 1).numpy())


@given(any_grids, merges)
def test_merge_gather_names_the_raster_rows_of_each_whole_unit(grid: Grid, m: int) -> None:
    t, h, w = grid
    expected = [
        [(frame * h + top + down) * w + left + across for down in range(m) for across in range(m)]
        for frame in range(t)
        for top in range(0, h - m + 1, m)
        for left in range(0, w - m + 1, m)
    ]
    found = merge_gather(grid, m)
    assert found.dtype == np.int64
    assert found.shape == (t * (h // m) * (w // m), m * m)
    np.testing.assert_array_equal(found, np.array(expected, dtype=np.int64).reshape(-1, m * m))


@given(any_grids, merges)
def test_merge_gather_uses_a_patch_once_and_leaves_out_only_the_incomplete_units(grid: Grid, m: int) -> None:
    used = merge_gather(grid, m).ravel()
    in_whole_unit = (raster_positions(grid) < np.array([grid.h // m * m, grid.w // m * m])).all(axis=1)
    np.testing.assert_array_equal(np.sort(used), np.flatnonzero(in_whole_unit))


@given(merged_grids())
def test_gathered_raster_rows_are_the_rows_in_merged_order(case: tuple[Grid, int]) -> None:
    grid, m = case
    np.testing.assert_array_equal(raster_positions(grid)[merge_gather(grid, m).ravel()], merged_positions(grid, m))


@given(st.lists(any_grids, min_size=1, max_size=5))
def test_frame_lengths_are_the_sequences_of_transformers(grids: list[Grid]) -> None:
    offsets = get_vision_cu_seqlens(torch.tensor(grids)).numpy()
    np.testing.assert_array_equal(np.concatenate([frame_lengths(grid) for grid in grids]), np.diff(offsets))


@given(any_grids)
def test_every_frame_is_one_sequence_and_they_cover_all_patches(grid: Grid) -> None:
    lengths = frame_lengths(grid)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [grid.h * grid.w] * grid.t
    assert lengths.sum() == grid.num_patches
