"""From path outputs to one tensor an item."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def gather_rows(pool: Sequence[Tensor], indices: Sequence[npt.NDArray[np.int64]]) -> list[Tensor]:
    """Each item's rows picked from a pool: one concatenation, one index copy, one gather for the whole batch.

    Args:
        pool: tensors `(rows, hidden)` of one dtype and device that count as one behind the other: path outputs, then
            learned delimiter rows.
        indices: for each item the pool rows that it consists of, in order; host integers.

    Returns:
        One `(len(indices[i]), hidden)` an item: views of one fresh tensor.
    """
    rows = torch.cat(list(pool))
    host = torch.from_numpy(np.concatenate(indices))
    if rows.is_cuda:
        host = host.pin_memory()
    gathered = rows.index_select(0, host.to(rows.device, non_blocking=True))
    return split_rows(gathered, [len(index) for index in indices])


def split_rows(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows of each item: `(sum(counts), ...)` to one `(counts[i], ...)` each, as views of `rows`.

    `rows` is fresh memory of this batch, so the views are the caller's; they share one allocation.
    """
    return [rows] if len(counts) == 1 else list(rows.split_with_sizes(list(counts)))
