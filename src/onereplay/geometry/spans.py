"""Where the rows of one item come from when results are put together: image rows with learned rows between them.

Legend: a pool holds the `k` learned rows (delimiters) first and then image rows. An index below `k` is a delimiter, the
same for every item; an index from `k` on is an image row, counted from the item's first.
"""

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


def with_newlines(rows: Int64, newline: int) -> Int64:
    """A picture's rows in raster order with `newline` behind each: int64 `(h, w)` to `(h * (w + 1),)`."""
    return np.insert(rows, rows.shape[1], newline, axis=1).reshape(-1)


def raster_of_tiles(down: int, across: int, side: int) -> Int64:
    """The place of each token of a picture that was cut into square tiles: int64 `(down * side, across * side)`.

    The tiles lie one behind the other, row by row, and so do the `side * side` tokens of each.
    """
    places = np.arange(down * across * side**2, dtype=np.int64).reshape(down, across, side, side)
    return places.swapaxes(1, 2).reshape(down * side, across * side)


def placed(index: Int64, first_row: int, num_delimiters: int) -> Int64:
    """The index of an item whose image rows begin at row `first_row` of those of the batch."""
    return np.where(index < num_delimiters, index, index + first_row)
