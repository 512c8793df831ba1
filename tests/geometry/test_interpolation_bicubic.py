"""Bicubic taps and positions of clips, against transformers' own helpers and `grid_sample`.

Weights: float32 in the same steps as transformers, so nearly always the same bits; 1e-6 leaves one rounding of a
product of two weights below 1.3. Sampled rows: a place on a table of 24 is known to 24 * 6e-8.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from onereplay.geometry import Grid, bicubic_taps, clip_lengths, clip_positions, raster_positions


@st.composite
def cases(draw: st.DrawFn) -> tuple[Grid, int, int]:
    """A grid whose sides are multiples of the merge side, that side, and a table's side."""
    m = draw(st.integers(1, 3))
    units = st.integers(1, 14)
    return Grid(draw(st.integers(1, 3)), m * draw(units), m * draw(units)), m, draw(st.integers(1, 30))


@given(cases())
def test_bicubic_taps_are_those_of_transformers(case: tuple[Grid, int, int]) -> None:
    grid, m, side = case
    expected = get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]), side, mode="bicubic", align_corners=False, spatial_merge_size=m
    )
    indices, weights = bicubic_taps(grid, side, m)
    assert indices.dtype == np.int32
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(indices, expected[0].numpy())
    np.testing.assert_allclose(weights, expected[1].numpy(), rtol=0, atol=1e-6)


@given(cases())
def test_bicubic_weights_add_up_to_one_and_name_rows_of_the_table(case: tuple[Grid, int, int]) -> None:
    grid, m, side = case
    indices, weights = bicubic_taps(grid, side, m)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=0, atol=2e-6)
    assert indices.min() >= 0
    assert indices.max() < side * side


@pytest.mark.parametrize("grid", [Grid(1, 18, 18), Grid(2, 24, 24), Grid(1, 5, 61)])
def test_bicubic_taps_sample_as_grid_sample_does(grid: Grid) -> None:
    table = torch.randn(24 * 24, 8, dtype=torch.float32)
    centres = (torch.from_numpy(raster_positions(grid)).float() + 0.5) / torch.tensor(grid[1:]) * 2 - 1
    sampled = torch.nn.functional.grid_sample(
        table.view(24, 24, 8).permute(2, 0, 1)[None],
        centres.flip(1)[None, :, None],
        mode="bicubic",
        align_corners=False,
        padding_mode="border",
    )[0, :, :, 0].T
    indices, weights = (torch.from_numpy(taps) for taps in bicubic_taps(grid, 24, 1))
    found = (table[indices.long()] * weights[..., None]).sum(1)
    assert (found - sampled).abs().max() <= 2e-5


def test_a_grid_of_the_tables_size_takes_the_table_as_it_is() -> None:
    indices, weights = bicubic_taps(Grid(1, 6, 6), 6, 1)
    largest = weights.argmax(1)
    np.testing.assert_array_equal(weights[np.arange(36), largest], np.ones(36, np.float32))
    np.testing.assert_array_equal(indices[np.arange(36), largest], np.arange(36))


@given(cases())
def test_clips_are_one_sequence_with_positions_on_three_axes(case: tuple[Grid, int, int]) -> None:
    grid, m, _ = case
    found = clip_positions(grid, m)
    assert found.dtype == clip_lengths(grid).dtype == np.int64
    np.testing.assert_array_equal(
        found, get_vision_position_ids(torch.tensor([grid]), m, include_temporal=True).numpy()
    )
    ends = get_vision_cu_seqlens(torch.tensor([grid]), merge_temporal=True).numpy()
    np.testing.assert_array_equal(clip_lengths(grid), np.diff(ends))
