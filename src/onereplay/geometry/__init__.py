"""Grids to metadata arrays: pure numpy, one grid at a time, no offsets (the core joins items and adds offsets)."""

from onereplay.geometry.grids import (
    Grid,
    clip_lengths,
    clip_positions,
    frame_lengths,
    merge_gather,
    merged_positions,
    nearest_positions,
    ragged_merge_gather,
    raster_positions,
    square_grid,
    unequal_parts,
)
from onereplay.geometry.interpolation import bicubic_taps, bilinear_taps
from onereplay.geometry.neighbours import OUTSIDE, neighbour_steps
from onereplay.geometry.spans import placed, raster_of_tiles, with_newlines
from onereplay.geometry.windows import window_lengths, window_order

__all__ = [
    "OUTSIDE",
    "Grid",
    "bicubic_taps",
    "bilinear_taps",
    "clip_lengths",
    "clip_positions",
    "frame_lengths",
    "merge_gather",
    "merged_positions",
    "nearest_positions",
    "neighbour_steps",
    "placed",
    "ragged_merge_gather",
    "raster_of_tiles",
    "raster_positions",
    "square_grid",
    "unequal_parts",
    "window_lengths",
    "window_order",
    "with_newlines",
]
