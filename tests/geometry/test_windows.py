"""Windows of one grid, against transformers' own helper and against loops. Integers: every comparison is exact."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig
from transformers.vision_utils import get_vision_window_index

from onereplay.adapters.qwen2_5_vl import Qwen25VL
from onereplay.geometry import Grid, window_lengths, window_order

PATCH_SIZE = 14
QWEN = Qwen25VL(Qwen2_5_VLConfig())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Grid, int, int]:
    """A grid, the side of a window in units and the side of a unit in patches."""
    m = draw(st.integers(1, 3))
    return (
        Grid(draw(st.integers(1, 4)), m * draw(st.integers(1, 13)), m * draw(st.integers(1, 13))),
        draw(st.integers(1, 5)),
        m,
    )


def windows_by_loops(grid: Grid, u: int, m: int) -> list[list[int]]:
    """The units of each window, frame by frame and row by row."""
    rows, columns = grid.h // m, grid.w // m
    return [
        [
            (frame * rows + row) * columns + column
            for row in range(top, min(top + u, rows))
            for column in range(left, min(left + u, columns))
        ]
        for frame in range(grid.t)
        for top in range(0, rows, u)
        for left in range(0, columns, u)
    ]


@given(cases())
def test_order_and_lengths_are_those_of_transformers(case: tuple[Grid, int, int]) -> None:
    grid, u, m = case
    index, offsets = get_vision_window_index(torch.tensor([grid]), m, u * m * PATCH_SIZE, PATCH_SIZE)
    np.testing.assert_array_equal(window_order(grid, u, m), index.numpy())
    np.testing.assert_array_equal(window_lengths(grid, u, m), np.diff(offsets.numpy()))


@given(cases())
def test_order_and_lengths_are_those_of_a_loop_over_windows(case: tuple[Grid, int, int]) -> None:
    windows = windows_by_loops(*case)
    np.testing.assert_array_equal(window_order(*case), [unit for window in windows for unit in window])
    np.testing.assert_array_equal(window_lengths(*case), [len(window) * case[2] ** 2 for window in windows])


@given(cases())
def test_order_is_a_permutation_of_all_tokens(case: tuple[Grid, int, int]) -> None:
    grid, _, m = case
    order = window_order(*case)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(grid.num_patches // m**2))


@given(cases())
def test_windows_cover_all_patches_and_none_is_empty_or_over_its_size(case: tuple[Grid, int, int]) -> None:
    grid, u, m = case
    lengths = window_lengths(*case)
    assert lengths.dtype == np.int64
    assert lengths.sum() == grid.num_patches
    assert lengths.min() > 0
    assert lengths.max() <= (u * m) ** 2


@given(
    st.builds(Grid, st.integers(1, 4), st.integers(1, 20).map(lambda n: 2 * n), st.integers(1, 20).map(lambda n: 2 * n))
)
def test_the_planned_number_of_windows_is_the_packed_one(grid: Grid) -> None:
    piece = QWEN.piece(grid)
    assert QWEN.size(grid).windows == len(piece["cu_window_seqlens"])
    assert QWEN.size(grid).sequences == len(piece["cu_seqlens"])
    assert QWEN.size(grid).longest == max(piece["cu_seqlens"])
    assert QWEN.size(grid).tokens == len(piece["window_index"])
    assert QWEN.size(grid).patches == len(piece["position_ids"])
