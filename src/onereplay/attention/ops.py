"""`onereplay::varlen_attention`, registered as an operator of PyTorch.

Shape legend: P patch rows, H query heads, K key heads (H is a multiple of K), D head size, S sequences.
"""

import torch
from torch import Tensor

from onereplay.attention.backends import BACKENDS, resolve_backend

_NAME = "onereplay::varlen_attention"
_library = torch.library.Library("onereplay", "FRAGMENT")
_library.define(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, SymInt max_seqlen, float scale, "
    "str backend) -> Tensor"
)


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
        backend: `auto`, `fa2`, `fa4` or `reference`; `resolve_backend` says what `auto` is.

    Returns:
        `(P, H, D)`, contiguous, of query's dtype.
    """
    output: Tensor = torch.ops.onereplay.varlen_attention(query, key, value, cu_seqlens, max_seqlen, scale, backend)
    return output


# Registered by hand and not through `torch.library.custom_op`, whose wrapper costs about 0.2 ms of host time a call.


def _run(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, backend: str
) -> Tensor:
    found = BACKENDS[resolve_backend(backend, query.device, max_seqlen, query.shape[-1])]
    return found(query, key, value, cu_seqlens, max_seqlen, scale)


def _shape(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, backend: str
) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


_opaque = torch.compiler.disable(_run)
"""The implementation is no code for `torch.compile`, also when a compiled block calls the operator."""

_library.impl("varlen_attention", _opaque, "CPU")
_library.impl("varlen_attention", _opaque, "CUDA")
torch.library.register_fake(_NAME, _shape, lib=_library)

OPERATOR = torch.ops.onereplay.varlen_attention
"""As PyTorch's tables of operators know it."""
