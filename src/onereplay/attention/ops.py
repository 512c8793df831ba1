"""`onereplay::varlen_attention`, registered as an operator of PyTorch.

Shape legend: P patch rows, H query heads, K key heads (H is a multiple of K), D head size, S sequences.
"""

import torch
from torch import Tensor

from onereplay.attention.backends import BACKENDS


@torch.library.custom_op("onereplay::varlen_attention", mutates_args=())
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, backend: str
) -> Tensor:
    """Attention of each row to the rows of its own sequence, without a mask.

    Args:
        query: `(P, H, D)`, any strides with contiguous D.
        key: `(P, K, D)`.
        value: `(P, K, D)`.
        cu_seqlens: int32 `(S + 1,)` on the same device, monotone from 0; empty sequences are allowed. Rows beyond the
            last offset belong to no sequence and their output is undefined (the reference makes it NaN).
        max_seqlen: a host integer, at least the longest sequence.
        scale: factor on the logits before the softmax.
        backend: `fa2`, `fa4` or `reference`; `resolve_backend` turns `auto` into one of them.

    Returns:
        `(P, H, D)`, contiguous, of query's dtype.
    """
    return BACKENDS[backend](query, key, value, cu_seqlens, max_seqlen, scale)


@varlen_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, backend: str
) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)
