"""Variable-length attention: one function with one signature, several back ends, one fixed rule for `auto`.

`varlen_attention` is a `torch.library` operator, so it is one opaque node to `torch.compile` and to the tracer: a trace
holds the call, not the loop over sequences, and a replay obeys new `cu_seqlens`.
"""

from onereplay.attention.backends import resolve_backend
from onereplay.attention.ops import varlen_attention

__all__ = ["resolve_backend", "varlen_attention"]
