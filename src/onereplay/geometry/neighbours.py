"""A convolution over the patches of each frame, as rows of neighbours.

Source: the short convolutions of LFM3-VL's tower (transformers: `Lfm3VlVisionShortConv`), which put every frame into
its raster, convolve it with a padding of zeros, and take it back to merged order.
"""

import numpy as np

from onereplay.geometry.grids import Grid, merged_positions
from onereplay.geometry.interpolation import Int32

OUTSIDE = int(np.iinfo(np.int32).min)
"""In place of a step: this neighbour lies outside the frame."""


def neighbour_steps(grid: Grid, m: int, k: int) -> Int32:
    """From each patch, the steps to the rows of its `k x k` neighbours: int32 `(t*h*w, k*k)`, the same in every frame.

    Patches are in merged order (`m`), neighbours row by row around the patch, which is the middle one with a step of 0.
    `k` is odd.
    """
    frame = merged_positions(Grid(1, grid.h, grid.w), m)
    own = np.arange(len(frame))
    rows = np.full((grid.h + k - 1, grid.w + k - 1), -1, dtype=np.int64)
    rows[frame[:, 0] + k // 2, frame[:, 1] + k // 2] = own
    down, across = (axis.ravel() for axis in np.indices((k, k)))
    neighbours = rows[frame[:, :1] + down, frame[:, 1:] + across]
    steps = np.where(neighbours < 0, OUTSIDE, neighbours - own[:, None]).astype(np.int32)
    return np.tile(steps, (grid.t, 1))
