"""The back ends of `varlen_attention` and the rule that picks one.

======== ======= ==================================================================================================
name     device  what runs
======== ======= ==================================================================================================
short    CUDA    a kernel of this project in Triton for sequences of up to 64 patches, in 16-bit types
fa2      CUDA    FlashAttention 2 as built into PyTorch (`aten._flash_attention_forward`)
fa4      CUDA    FlashAttention 4 (`pip install flash-attn-4`), compute capability 9.0 and newer
reference CPU    one `scaled_dot_product_attention` a sequence; rows of no sequence become NaN, so that a gap shows
======== ======= ==================================================================================================

`auto` on CUDA is short for sequences of up to 64 patches where Triton is installed; fa4 where that is installed and
the sequences may be longer than 256 patches; else fa2. Measured on an H200, 16 heads of 80: FA4 takes 0.48 of FA2's
time at 4,096 patches a sequence and 0.67 at 1,024, but 1.2 times as long at 256 and 2.7 times at 64.
"""

import functools
import importlib
import importlib.util
import logging
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from onereplay.errors import ConfigError, MissingDependencyError

logger = logging.getLogger(__name__)

FA4_MIN_SEQLEN = 257
"""`auto` prefers fa4 from this bound on the sequence length upwards."""

SHORT_MAX_SEQLEN = 64
"""`auto` prefers short up to this bound."""

HEAD_SIZES = (64, 72, 80, 88, 96, 112, 128)
"""Head sizes that vision encoders use and that every back end is tested on."""


def resolve_backend(name: str, device: torch.device, max_seqlen: int, head_size: int | None = None) -> str:
    """The back end that `name` means on this device for sequences of up to `max_seqlen` patches.

    `auto` leaves sizes of heads that are not in `HEAD_SIZES` to fa2.

    Raises:
        ConfigError: the named back end cannot run on this device.
        MissingDependencyError: fa4 was asked for by name and is not installed.
    """
    if device.type == "cuda":
        return _resolve_cuda(name, device, max_seqlen, head_size)
    if name not in ("auto", "reference"):
        raise ConfigError(f"attention={name!r} needs a CUDA device, the encoder is on {device}; use auto or reference")
    return "reference"


def _resolve_cuda(name: str, device: torch.device, max_seqlen: int, head_size: int | None) -> str:
    if name == "reference":
        raise ConfigError("attention='reference' reads lengths on the host, so no CUDA graph can hold it; use auto")
    if name == "fa4" and not fa4_installed():
        raise MissingDependencyError("attention='fa4' needs FlashAttention 4: pip install \"onereplay[gpu]\"")
    if name == "fa4" and not _fa4_runs_on(device):
        raise ConfigError(f"attention='fa4' needs compute capability 9.0 or newer, {device} is older; use auto or fa2")
    if name == "short" and max_seqlen > SHORT_MAX_SEQLEN:
        raise ConfigError(f"attention='short' holds sequences of up to {SHORT_MAX_SEQLEN} patches, got {max_seqlen}")
    if name in BACKENDS:
        return name
    if name != "auto":
        raise ConfigError(f"attention={name!r} is unknown; use auto, {', '.join(BACKENDS)}")
    if max_seqlen <= SHORT_MAX_SEQLEN:
        return _log_choice("short" if triton_installed() else "fa2", f"of up to {SHORT_MAX_SEQLEN}")
    if max_seqlen < FA4_MIN_SEQLEN:
        return _log_choice("fa2", f"of up to {FA4_MIN_SEQLEN - 1}")
    use_fa4 = fa4_available(device) and head_size in (None, *HEAD_SIZES)
    return _log_choice("fa4" if use_fa4 else "fa2", f"longer than {FA4_MIN_SEQLEN - 1}")


@functools.cache
def _log_choice(backend: str, lengths: str) -> str:
    logger.info("attention: %s for sequences %s patches", backend, lengths)
    return backend


@functools.cache
def triton_installed() -> bool:
    """True if Triton is there; CUDA builds of PyTorch for Linux bring it along."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def fa4_installed() -> bool:
    """True if the `flash-attn-4` package can be imported; a broken installation is logged and counts as absent."""
    try:
        if importlib.util.find_spec("flash_attn.cute") is None:
            return False
    except ModuleNotFoundError:
        return False
    try:
        importlib.import_module("flash_attn.cute")
    except ImportError as error:
        logger.warning("flash-attn-4 is installed but cannot be imported (%s); attention='auto' uses fa2", error)
        return False
    return True


def fa4_available(device: torch.device) -> bool:
    """True if fa4 is installed and runs on this device."""
    return device.type == "cuda" and fa4_installed() and _fa4_runs_on(device)


@functools.cache
def _fa4_runs_on(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def fa2(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """FlashAttention 2 of PyTorch; shapes as in `varlen_attention`."""
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, False, False, scale=scale
    )[0]
    return output


def fa4(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """FlashAttention 4; shapes as in `varlen_attention`. The first call for a head size compiles for seconds."""
    from flash_attn.cute import flash_attn_varlen_func

    result = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
    )
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def short(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """The kernel of `attention.short`; shapes as in `varlen_attention`."""
    from onereplay.attention.short import short_attention

    return short_attention(query, key, value, cu_seqlens, scale)


def reference(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """One dense attention a sequence; reads `cu_seqlens` on the host. Rows of no sequence are NaN.

    Raises:
        ValueError: a sequence is longer than `max_seqlen`, which a GPU kernel would cut off without a word.
    """
    offsets = cu_seqlens.tolist()
    output = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    for start, end in pairwise(offsets):
        if end - start > max_seqlen:
            raise ValueError(f"a sequence of {end - start} patches exceeds max_seqlen={max_seqlen}")
        if end > start:
            rows = slice(start, end)
            output[rows] = _dense(query[rows], key[rows], value[rows], scale)
    return output


def _dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    output = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return output[0].transpose(0, 1)


BACKENDS = {"short": short, "fa2": fa2, "fa4": fa4, "reference": reference}
