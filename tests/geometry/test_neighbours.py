"""Steps to neighbours, against padding and convolving every frame in its raster."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onereplay.geometry import OUTSIDE, Grid, merged_positions, neighbour_steps

GRIDS = st.builds(
    lambda t, h, w, m: (Grid(t, h * m, w * m), m),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([1, 2, 3]),
)


@given(GRIDS, st.sampled_from([1, 3, 5]))
@settings(deadline=None, max_examples=60)
def test_a_sum_over_neighbours_is_the_convolution_of_each_frame(case: tuple[Grid, int], k: int) -> None:
    """Integers, so the sums are exact."""
    grid, m = case
    generator = torch.Generator().manual_seed(grid.num_patches)
    frames = torch.randint(-9, 9, (grid.t, 1, grid.h, grid.w), generator=generator).double()
    kernel = torch.randint(-9, 9, (1, 1, k, k), generator=generator).double()
    rows, columns = merged_positions(Grid(1, grid.h, grid.w), m).T
    expected = torch.conv2d(frames, kernel, padding=k // 2)[:, 0, rows, columns].ravel().numpy()

    values = frames[:, 0, rows, columns].ravel().numpy()
    steps = neighbour_steps(grid, m, k)
    assert steps.shape == (grid.num_patches, k * k)
    assert steps.dtype == np.int32
    inside = steps != OUTSIDE
    places = np.arange(len(steps))[:, None] + np.where(inside, steps, 0)
    np.testing.assert_array_equal((np.where(inside, values[places], 0) * kernel.ravel().numpy()).sum(1), expected)


def test_the_middle_neighbour_is_the_patch_itself_and_a_corner_has_four() -> None:
    steps = neighbour_steps(Grid(2, 4, 6), 2, 3)
    assert (steps[:, 4] == 0).all()
    assert (steps[0] != OUTSIDE).sum() == 4
    assert steps[0].tolist() == [OUTSIDE] * 4 + [0, 1, OUTSIDE, 2, 3]
    assert np.array_equal(steps[:24], steps[24:]), "frames are alike"
