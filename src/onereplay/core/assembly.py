"""From path outputs to one tensor an item."""

from collections.abc import Sequence

from torch import Tensor


def split_rows(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows of each item: `(sum(counts), ...)` to one `(counts[i], ...)` each, as views of `rows`.

    `rows` is fresh memory of this batch, so the views are the caller's; they share one allocation.
    """
    return list(rows.split(list(counts)))
