"""Grids and counts may be of any kind of integer; truth values and fractions are no counts."""

from typing import Any

import numpy as np
import pytest
import torch

from onereplay.adapters.base import host_integers, host_rows
from onereplay.adapters.multipath import local_counts
from onereplay.errors import InputError

TABLE = [[1, 4, 6], [2, 8, 8]]


@pytest.mark.parametrize(
    "table",
    [
        TABLE,
        tuple(map(tuple, TABLE)),
        torch.tensor(TABLE),
        np.array(TABLE, dtype=np.int32),
        list(np.array(TABLE)),
        list(torch.tensor(TABLE)),
        [[np.int64(entry) for entry in row] for row in TABLE],
        [[np.uint8(entry) for entry in row] for row in TABLE],
        [[torch.tensor(entry) for entry in row] for row in TABLE],
        [(np.int64(1), 4, torch.tensor(6)), np.array([2, 8, 8])],
    ],
)
def test_a_table_of_any_integers_becomes_lists_of_pythons(table: Any) -> None:
    rows = host_rows("image_grid_thw", table, 3)
    assert rows == TABLE
    assert {type(entry) for row in rows for entry in row} == {int}


@pytest.mark.parametrize(
    "table",
    [
        [[1, 4, True]],
        [[1, 4, np.True_]],
        [[1, 4, torch.tensor(True)]],
        [np.array([True, True, True])],
        torch.ones(1, 3, dtype=torch.bool),
        [[1, 4, 6.0]],
        [[1, 4, np.float64(6)]],
        torch.ones(1, 3),
        [[1, 4, "6"]],
        [[1, 4, None]],
    ],
)
def test_what_is_no_integer_is_refused_in_a_table(table: Any) -> None:
    with pytest.raises(InputError, match="image_grid_thw must hold integers"):
        host_rows("image_grid_thw", table, 3)


@pytest.mark.parametrize(
    "table", [[1, 4, 6], torch.tensor([1, 4, 6]), 7, np.int64(7), [[1, 4]], [np.int64(1)], [[[1, 4, 6]]], "146"]
)
def test_another_shape_is_refused(table: Any) -> None:
    with pytest.raises(InputError, match=r"image_grid_thw must (be a table of|have) 3 columns"):
        host_rows("image_grid_thw", table, 3)


@pytest.mark.parametrize(
    "counts",
    [[3, 1], (3, 1), torch.tensor([3, 1]), np.array([3, 1]), [np.int64(3), 1], [torch.tensor(3), np.uint16(1)]],
)
def test_counts_of_any_integers_become_pythons(counts: Any) -> None:
    for found in (host_integers("num_patches", counts, 1), local_counts(counts, 2)):
        assert found == [3, 1]
        assert {type(count) for count in found} == {int}


@pytest.mark.parametrize(
    "counts", [[3, True], [3, np.True_], [3, torch.tensor(True)], [3.0], [np.float32(3)], [-1], 3, np.int64(3), [[3]]]
)
def test_what_is_no_count_is_refused(counts: Any) -> None:
    with pytest.raises(InputError, match="num_patches="):
        host_integers("num_patches", counts, 0)
    with pytest.raises(InputError, match="num_local_patches="):
        local_counts(counts, None)
