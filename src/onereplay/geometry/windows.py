"""Window attention: the order that puts each window's tokens side by side, and the windows' lengths.

Source: Qwen2.5-VL's `get_window_index` (transformers: `get_vision_window_index`), which pads every frame to whole
windows and drops the padding again. Here `u` is the side of a window in merged units.
"""

import numpy as np

from onereplay.geometry.grids import Grid, Int64


def window_order(grid: Grid, u: int, m: int) -> Int64:
    """Merged units (tokens) in window order: int64 `(tokens,)`, a permutation.

    Windows run frame by frame, row by row; inside a window the units run row by row.
    """
    window = _window_of_unit(grid, u, m)
    return np.argsort(window, kind="stable")


def window_lengths(grid: Grid, u: int, m: int) -> Int64:
    """Patches of each window, in window order: int64 `(t * ceil(h/(m*u)) * ceil(w/(m*u)),)`, none empty."""
    _, units = np.unique(_window_of_unit(grid, u, m), return_counts=True)
    return units.astype(np.int64) * (m * m)


def _window_of_unit(grid: Grid, u: int, m: int) -> Int64:
    """The number of the window that each unit lies in, units in raster order: int64 `(tokens,)`."""
    frames, rows, columns = np.indices((grid.t, grid.h // m, grid.w // m), dtype=np.int64)
    down, across = -(-(grid.h // m) // u), -(-(grid.w // m) // u)
    window: Int64 = (frames * down + rows // u) * across + columns // u
    return window.ravel()
