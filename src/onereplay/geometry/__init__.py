"""Grids to metadata arrays: pure numpy, one grid at a time, no offsets (the core joins items and adds offsets)."""

from onereplay.geometry.grids import (
    Grid,
    frame_lengths,
    merge_gather,
    merged_positions,
    raster_positions,
    square_grid,
    unequal_parts,
)
from onereplay.geometry.windows import window_lengths, window_order

__all__ = [
    "Grid",
    "frame_lengths",
    "merge_gather",
    "merged_positions",
    "raster_positions",
    "square_grid",
    "unequal_parts",
    "window_lengths",
    "window_order",
]
