"""A learned table of positions resampled to grids: the sum over taps, shared by the towers that have one.

The taps (`onereplay.geometry.interpolation`) are metadata of the batch: a row of the table and a weight for each.
"""

from torch import Tensor
from torch.nn.functional import embedding_bag


def sum_taps(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """For each patch the weighted sum of its table rows: `(P, C)` in the table's dtype.

    Products and sums are in float32 and one after another, as in `(table[indices] * weights[..., None]).sum(1)`, but in
    one kernel: nothing of `(P, taps, C)` is ever there, which is 302 MB for 16,384 patches of Qwen3-VL and its four
    taps. Its table in float32 is 11 MB.

    Args:
        table: `(places, C)`.
        indices: rows of the table, int32 or int64 `(P, taps)`.
        weights: float32 `(P, taps)`.
    """
    return embedding_bag(indices, table.float(), per_sample_weights=weights, mode="sum").to(table.dtype)
