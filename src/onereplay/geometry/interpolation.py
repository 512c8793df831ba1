"""A learned square table of positions resampled to a grid: for each patch, rows of the table and their weights.

Legend: `side` is the table's side (row `r * side + c` of the flat table is its place `(r, c)`); `m` is the side of a
merged unit, whose order the patches are in (1: raster order). Arithmetic is in float32, step by step as in
`transformers.vision_utils`, so that indices at whole numbers come out the same.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from onereplay.geometry.grids import Grid, Int64, merged_positions

Float32: TypeAlias = npt.NDArray[np.float32]
Int32: TypeAlias = npt.NDArray[np.int32]


def bilinear_taps(grid: Grid, side: int, m: int) -> tuple[Int32, Float32]:
    """Four table rows of each patch and their weights: int32 and float32 `(t*h*w, 4)`, the same in every frame.

    The corners of the grid lie on the corners of the table (`align_corners=True`), and a grid of one row or column on
    its first. The weights of a patch add up to 1.

    Source: Qwen3-VL's position embedding (`get_vision_interpolation_indices_and_weights` of transformers).
    """
    rows, columns = (_linear_axis(length, side) for length in grid[1:])
    return _outer(grid, side, m, rows, columns)


def bicubic_taps(grid: Grid, side: int, m: int) -> tuple[Int32, Float32]:
    """Sixteen table rows of each patch and their weights: int32 and float32 `(t*h*w, 16)`, the same in every frame.

    Grid and table cover the same square (`align_corners=False`); places beyond the table's border are those on it. The
    kernel is that of Keys with a = -0.75, which `interpolate` and `grid_sample` have too. Weights of a patch add up to
    1, some are negative.

    Source: GLM-4.1V's and Kimi-K2.5's position embeddings (`get_vision_interpolation_indices_and_weights`).
    """
    rows, columns = (_cubic_axis(length, side) for length in grid[1:])
    return _outer(grid, side, m, rows, columns)


def _linear_axis(length: int, side: int) -> tuple[Int64, Float32]:
    """Two places on an axis of the table for each of `length` positions, and their weights: `(length, 2)` each."""
    source = np.arange(length, dtype=np.float32) * np.float32(side - 1) / np.float32(max(length - 1, 1))
    floor = np.floor(source)
    offsets = np.arange(2)
    places = np.minimum(floor.astype(np.int64)[:, None] + offsets, side - 1)
    distance = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))
    return places, np.maximum(np.float32(1) - distance, np.float32(0))


def _cubic_axis(length: int, side: int) -> tuple[Int64, Float32]:
    """Four places on an axis of the table for each of `length` positions, and their weights: `(length, 4)` each."""
    half, a = np.float32(0.5), np.float32(-0.75)
    source = (np.arange(length, dtype=np.float32) + half) * np.float32(side) / np.float32(length) - half
    floor = np.floor(source)
    offsets = np.arange(-1, 3)
    places = np.clip(floor.astype(np.int64)[:, None] + offsets, 0, side - 1)
    x = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return places, np.where(x <= 1, near, far)


def _outer(
    grid: Grid, side: int, m: int, rows: tuple[Int64, Float32], columns: tuple[Int64, Float32]
) -> tuple[Int32, Float32]:
    """Every row's taps with every column's, for each patch: `(t*h*w, n*n)`, rows slowest."""
    frame = merged_positions(Grid(1, grid.h, grid.w), m)
    down, across = frame[:, 0], frame[:, 1]
    places = rows[0][down][:, :, None] * side + columns[0][across][:, None, :]
    weights = rows[1][down][:, :, None] * columns[1][across][:, None, :]
    flat = (len(frame), -1)
    return (
        np.tile(places.reshape(flat).astype(np.int32), (grid.t, 1)),
        np.tile(weights.reshape(flat), (grid.t, 1)),
    )
