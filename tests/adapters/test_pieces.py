"""Metadata of grids that come again is kept, within a number of bytes."""

import numpy as np
import pytest
import torch

from onereplay.adapters import adapter_class
from onereplay.adapters.packed import _Kept
from onereplay.core.buffers import Array
from onereplay.geometry import Grid
from onereplay.presets import get_preset, hf_config


class Maker:
    """Pieces of 8 bytes a patch, and which grids were asked for."""

    def __init__(self) -> None:
        self.asked: list[Grid] = []

    def __call__(self, grid: Grid) -> dict[str, Array]:
        self.asked.append(grid)
        return {"rows": np.arange(grid.num_patches, dtype=np.int64)}


SMALL, MIDDLE, LARGE = Grid(1, 2, 2), Grid(1, 4, 4), Grid(1, 100, 100)


def test_a_grid_that_comes_again_is_a_look_up() -> None:
    make = Maker()
    kept = _Kept(make, 1000)
    assert kept(SMALL) is kept(SMALL)
    assert make.asked == [SMALL]


def test_the_grids_that_came_last_are_kept_within_the_bytes() -> None:
    make = Maker()
    kept = _Kept(make, 8 * (4 + 16))
    for grid in (SMALL, MIDDLE, SMALL, Grid(1, 4, 2), SMALL, MIDDLE):
        kept(grid)
    assert make.asked == [SMALL, MIDDLE, Grid(1, 4, 2), MIDDLE]


def test_a_grid_larger_than_all_room_is_served_and_leaves_the_room_to_the_next() -> None:
    make = Maker()
    kept = _Kept(make, 1000)
    assert len(kept(LARGE)["rows"]) == 10_000
    kept(SMALL)
    kept(SMALL)
    assert make.asked == [LARGE, SMALL]


def test_pieces_of_many_grids_are_those_of_each() -> None:
    make = Maker()
    kept = _Kept(make, 1000)
    assert all(
        one is kept(grid) for one, grid in zip(kept.all_of([SMALL, MIDDLE, SMALL]), [SMALL, MIDDLE, SMALL], strict=True)
    )
    assert make.asked == [SMALL, MIDDLE]


def test_batches_of_one_grid_have_a_key_of_grid_and_number_and_mixes_have_none() -> None:
    preset = get_preset("qwen2_5_vl-7b@tiny")
    adapter = adapter_class(preset.model_type)(hf_config(preset))

    def key(*grids: Grid) -> object:
        inputs = adapter.example_inputs(grids, torch.Generator().manual_seed(0))
        return adapter.pack("vision", adapter.batch(**inputs)).key

    keys = [key(*grids) for grids in ([SMALL], [SMALL] * 2, [MIDDLE], [MIDDLE] * 2)]
    assert None not in keys
    assert len(set(keys)) == 4
    assert key(SMALL, SMALL) == keys[1]
    assert key(SMALL, MIDDLE) is None


def test_a_piece_that_cannot_be_made_is_not_kept() -> None:
    def fail(grid: Grid) -> dict[str, Array]:
        raise ValueError("no")

    kept = _Kept(fail, 1000)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            kept(SMALL)
