"""`varlen_attention` as an attention implementation of transformers.

Towers of the Qwen line hand their layers `cu_seqlens` when the name of their attention implementation contains "flash";
the SigLIP 2 layers hand on nothing but `attention_mask`. So the registered function takes the offsets from either, and
a call that is not ours (a mask of another kind, no offsets) goes to transformers' own sdpa, unchanged.

`use_varlen(config, ...)` switches a tower over for the length of a `with` block and back. The name cannot go through
`set_attn_implementation`: transformers would look for a flash kernel of that name on the hub.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onereplay.attention.backends import fa4_available
from onereplay.attention.ops import varlen_attention
from onereplay.config import ATTENTION_BACKENDS

PREFIX = "onereplay_flash_varlen_"
"""The registered names are this and a back end; "flash" in it is what makes the Qwen line pass `cu_seqlens`."""


HALF_TYPES = (torch.bfloat16, torch.float16)


class _Active(threading.local):
    """What the running forward of this thread asked for."""

    tiles: bool = False
    """The forward's batch is tiles of one length without a mask, each a sequence."""


_active = _Active()


def attention_forward(
    backend: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that transformers calls: query, key and value are `(1, heads, P, D)`; returns `(1, P, heads, D)`.

    In a forward of tiles they are `(tiles, heads, rows, D)`, and so is the result with heads and rows swapped.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if cu_seq_lens_q is not None:
        bound = max_length_q if max_length_q is not None else query.shape[2]
        return _packed_forward(query, key, value, cu_seq_lens_q, bound, scale, backend), None
    if _active.tiles and attention_mask is None:
        return _tiles_forward(query, key, value, scale, backend), None
    if attention_mask is None or not _holds_offsets(attention_mask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    return _packed_forward(query, key, value, attention_mask[0], attention_mask.shape[0], scale, backend), None


def _packed_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, backend: str
) -> Tensor:
    q, k, v = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    return varlen_attention(q, k, v, cu_seqlens, max_seqlen, scale, backend).unsqueeze(0)


def _tiles_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, backend: str) -> Tensor:
    tiles, _, length, _ = query.shape
    cu_seqlens = torch.arange(0, (tiles + 1) * length, length, dtype=torch.int32, device=query.device)
    q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
    output = varlen_attention(q, k, v, cu_seqlens, length, scale, backend)
    return output.view(tiles, length, *output.shape[1:])


def offsets_of(
    cu_seqlens: Tensor | None, max_seqlen: int | None, attention_mask: Tensor | None
) -> tuple[Tensor | None, int]:
    """The cumulative lengths that a block was handed in one form or another, and the bound on a length.

    Args:
        cu_seqlens: int32 `(S + 1,)`.
        max_seqlen: with it; `None` where the tower hands on none.
        attention_mask: of `as_mask`, or another kind of mask, which holds no offsets.

    Returns:
        `None` and 0 where there are none: then a mask decides, or each tile attends to all of itself.

    Raises:
        ValueError: offsets without a bound.
    """
    if cu_seqlens is not None:
        if max_seqlen is None:
            raise ValueError("the tower handed its blocks cu_seqlens without max_seqlen")
        return cu_seqlens, max_seqlen
    if attention_mask is not None and _holds_offsets(attention_mask):
        return attention_mask[0], attention_mask.shape[0]
    return None, 0


def backend_of(module: Any) -> str:
    """The back end that `use_varlen` chose for an attention module; `auto` where none is open."""
    name = str(module.config._attn_implementation)
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else "auto"


def as_mask(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Offsets for layers that hand on nothing but `attention_mask`: int32 `(max_seqlen, S + 1)`, every row the offsets.

    A view without memory of its own, whose height is the bound: so the bound travels with the offsets, and compiled
    layers see a size that varies where a value of Python would be compiled in.
    """
    return cu_seqlens.expand(max_seqlen, -1)


def _holds_offsets(attention_mask: Tensor) -> bool:
    """A mask of `as_mask`; a row alone has a stride that means nothing."""
    repeated = attention_mask.ndim == 2 and (attention_mask.shape[0] == 1 or attention_mask.stride(0) == 0)
    return repeated and attention_mask.dtype == torch.int32


@contextlib.contextmanager
def use_varlen(config: Any, backend: str, *, tiles: bool = False) -> Iterator[None]:
    """Run the tower of this transformers vision config through `varlen_attention` inside the block.

    Args:
        config: the tower's config object, shared by its layers.
        backend: a name of `onereplay.attention`, `auto` too.
        tiles: the forward's batch is tiles of one length without a mask.
    """
    previous, _active.tiles = _active.tiles, tiles
    block = _switch(config, PREFIX + backend)
    try:
        yield
    finally:
        _switch_back(config, block)
        _active.tiles = previous


def use_varlen_on_tiles(config: Any, backend: str, weight: Tensor) -> contextlib.AbstractContextManager[None]:
    """`use_varlen` for a tower on tiles, whose own attention has no mask and is as right.

    `auto` keeps that, but for 16-bit types where fa4 is there: on an H200, 20 tiles of 1,025 rows and 16 heads of 64
    take 0.26 ms a layer in it and 0.40 in FlashAttention 2.

    Args:
        config: the tower's.
        backend: a name of `onereplay.attention`.
        weight: says where the tower runs and in which type.
    """
    if backend == "auto" and not (weight.dtype in HALF_TYPES and fa4_available(weight.device)):
        return contextlib.nullcontext()
    return use_varlen(config, backend, tiles=True)


@dataclass
class _Switched:
    """The name that a config had, and the names of the blocks that are open on it, in the order of their opening."""

    original: str | None
    open: dict[object, str] = field(default_factory=dict)


_switch_lock = threading.Lock()
_switched: dict[int, _Switched] = {}
"""By `id(config)`. Blocks nest, and those of several threads may overlap: the last one that is open gives the name, and
the original returns with the end of all."""


def _switch(config: Any, name: str) -> object:
    block = object()
    with _switch_lock:
        _switched.setdefault(id(config), _Switched(config._attn_implementation)).open[block] = name
        config._attn_implementation = name
    return block


def _switch_back(config: Any, block: object) -> None:
    with _switch_lock:
        state = _switched[id(config)]
        del state.open[block]
        config._attn_implementation = next(reversed(state.open.values()), state.original)
        if not state.open:
            del _switched[id(config)]


def register() -> None:
    """Make the names known to transformers; done once on import.

    The mask goes with it: for a name without a mask function transformers drops padding masks without a word, and a
    plain call of the user's in another thread may see this name while a block is open.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for backend in ATTENTION_BACKENDS:
        AttentionInterface.register(PREFIX + backend, functools.partial(attention_forward, backend))
        AttentionMaskInterface.register(PREFIX + backend, sdpa_mask)


register()
