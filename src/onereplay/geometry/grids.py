"""Positions, sequence lengths and merge gathers of one grid.

Legend: a grid is `(t, h, w)`, frames by rows by columns, in patches; `m` is the side of a merged unit in patches.
"Merged order" lists the patches unit by unit (all `m x m` patches of a unit, then the next unit); "raster order" lists
them row by row.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


class Grid(NamedTuple):
    """Frames, rows and columns of one item, in patches."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        """Patches over all frames."""
        return self.t * self.h * self.w


def frame_lengths(grid: Grid) -> Int64:
    """Patches of each frame: int64 `(t,)`. One sequence a frame."""
    return np.full(grid.t, grid.h * grid.w, dtype=np.int64)


def clip_lengths(grid: Grid) -> Int64:
    """Patches of all frames together: int64 `(1,)`. One sequence a clip."""
    return np.array([grid.num_patches], dtype=np.int64)


def raster_positions(grid: Grid) -> Int64:
    """Row and column of each patch in raster order, the same in every frame: int64 `(t*h*w, 2)`."""
    rows, columns = np.divmod(np.arange(grid.h * grid.w, dtype=np.int64), grid.w)
    return np.tile(np.stack([rows, columns], axis=-1), (grid.t, 1))


def merged_positions(grid: Grid, m: int) -> Int64:
    """Row and column of each patch in merged order, the same in every frame: int64 `(t*h*w, 2)`.

    Source: Qwen2-VL's vision rotary embedding (`get_vision_position_ids` of transformers computes the same table).
    `h` and `w` are multiples of `m`.
    """
    rows, columns = np.indices((grid.h, grid.w), dtype=np.int64)
    units = np.stack([rows, columns], axis=-1).reshape(grid.h // m, m, grid.w // m, m, 2)
    return np.tile(units.swapaxes(1, 2).reshape(-1, 2), (grid.t, 1))


def clip_positions(grid: Grid, m: int) -> Int64:
    """Frame, row and column of each patch in merged order: int64 `(t*h*w, 3)`. For towers that attend across frames.

    Source: MiniMax-M3's vision rotary embedding (`get_vision_position_ids` with `include_temporal`).
    """
    frames = np.repeat(np.arange(grid.t, dtype=np.int64), grid.h * grid.w)
    return np.concatenate([frames[:, None], merged_positions(grid, m)], axis=1)


def merge_gather(grid: Grid, m: int) -> Int64:
    """For each merged token, the raster rows of its `m x m` patches: int64 `(t * (h//m) * (w//m), m*m)`.

    Patches inside a unit come row by row; a last row or column that fills no unit belongs to no token.
    """
    patches = np.arange(grid.num_patches, dtype=np.int64).reshape(grid)
    whole = patches[:, : grid.h // m * m, : grid.w // m * m]
    units = whole.reshape(grid.t, grid.h // m, m, grid.w // m, m)
    return units.swapaxes(2, 3).reshape(-1, m * m)


def nearest_positions(grid: Grid, side: int) -> Int64:
    """The nearest entry of a table of `side x side` positions for each patch in raster order, the same in every frame:
    int64 `(t*h*w,)`, rows of the flattened table.

    Row i of h falls into the last of the table's rows that starts at or before `i / h`; columns alike. Where the two
    are equal rounding decides: as in float32 on a CPU. (On a GPU transformers rounds otherwise and takes the row before
    for some of these; pass it sizes on the CPU.)

    Source: MiniCPM-V (`get_vision_nearest_position_ids` of transformers).
    """
    starts = (np.arange(1, side) / side).astype(np.float32)
    rows, columns = (
        np.searchsorted(starts, np.arange(count, dtype=np.float32) / np.float32(count), side="right")
        for count in (grid.h, grid.w)
    )
    return np.tile((rows[:, None] * side + columns).ravel(), grid.t)


def ragged_merge_gather(grid: Grid, m: int) -> tuple[Int64, npt.NDArray[np.uint8]]:
    """`merge_gather` of a grid that is filled up, below and on the right, to multiples of `m`.

    Returns:
        int64 `(t * ceil(h/m) * ceil(w/m), m*m)`, where a place outside the grid holds the nearest patch inside; and
        uint8 of the same shape, 1 inside and 0 outside.
    """
    height, width = (-(-side // m) * m for side in grid[1:])
    filled = merge_gather(Grid(grid.t, height, width), m)
    frames, rows, columns = np.unravel_index(filled, (grid.t, height, width))
    inside = (rows < grid.h) & (columns < grid.w)
    nearest = (frames * grid.h + rows.clip(max=grid.h - 1)) * grid.w + columns.clip(max=grid.w - 1)
    return nearest.astype(np.int64), inside.astype(np.uint8)


def square_grid(tokens: int, m: int) -> Grid:
    """One frame of exactly this many merged tokens, as square as their divisors allow; sides multiples of `m`."""
    height = max(side for side in range(1, math.isqrt(tokens) + 1) if tokens % side == 0)
    return Grid(1, height * m, tokens // height * m)


def unequal_parts(total: int, parts: int) -> list[int]:
    """`parts` numbers that add up to `total`, all `total // parts` but the first, which takes the rest as well."""
    small = total // parts
    return [total - small * (parts - 1), *[small] * (parts - 1)]
