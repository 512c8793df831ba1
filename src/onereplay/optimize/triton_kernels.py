"""The kernels of `onereplay.optimize.kernels` in Triton. Importing this file needs Triton, which CUDA builds of PyTorch
bring along."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 4, 512
"""Tile of the kernels that work value by value."""


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """An activation in float32."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "quick_gelu":
        return x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    else:
        # GELU by the error function, as Abramowitz and Stegun 7.1.26 has it: within 1.5e-7, in half the instructions.
        z = tl.abs(x) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.3275911 * z)
        series = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
        tail = 0.5 * x * t * series * tl.exp(-z * z)
        return tl.where(x < 0.0, tail, x - tail)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    branch,
    normed,
    weight,
    bias,
    scale,
    before,
    after,
    rows,
    epsilon,
    WIDTH: tl.constexpr,
    RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; see `kernels.norm`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    places = row * WIDTH + columns
    hidden = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        added = tl.load(branch + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_BEFORE:
            added += tl.load(before + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_SCALE:
            added *= tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
        hidden += added
    elif HAS_BEFORE:
        hidden += tl.load(before + columns, mask=inside, other=0.0).to(tl.float32)
    centred = hidden
    if not RMS:
        centred = tl.where(inside, hidden - tl.sum(hidden, 0) / WIDTH, 0.0)
    variance = tl.sum(centred * centred, 0) / WIDTH
    result = centred * tl.rsqrt(variance + epsilon) * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + places, result.to(normed.dtype.element_ty), mask=inside)
    if HAS_BRANCH or HAS_BEFORE or HAS_AFTER:
        if HAS_AFTER:
            hidden += tl.load(after + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + places, hidden.to(x.dtype.element_ty), mask=inside)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    rms: bool,
    branch: Tensor | None,
    scale: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
) -> Tensor:
    """See `kernels.norm`."""
    rows, width = x.shape
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x,
        x if branch is None else branch,
        normed,
        weight,
        weight if bias is None else bias,
        weight if scale is None else scale,
        weight if before is None else before,
        weight if after is None else after,
        rows,
        epsilon,
        WIDTH=width,
        RMS=rms,
        HAS_BIAS=bias is not None,
        HAS_BRANCH=branch is not None,
        HAS_SCALE=scale is not None,
        HAS_BEFORE=before is not None,
        HAS_AFTER=after is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )
    return normed


@triton.jit(do_not_specialize=["rows"])
def _add(
    x,
    branch,
    bias,
    scale,
    rows,
    width,
    branch_row,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile; see `kernels.add`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    added = tl.load(branch + row[:, None] * branch_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if HAS_SCALE:
        added *= tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    target = x + row[:, None] * width + column[None, :]
    added += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, added.to(x.dtype.element_ty), mask=inside)


def add(x: Tensor, branch: Tensor, bias: Tensor | None, scale: Tensor | None) -> None:
    """See `kernels.add`."""
    rows, width = x.shape
    _add[_tiles(rows, width)](
        x,
        branch,
        x if bias is None else bias,
        x if scale is None else scale,
        rows,
        width,
        branch.stride(0),
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _activate(
    x, rows, width, x_row, bias, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A tile; see `kernels.activate`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = x + row[:, None] * x_row + column[None, :]
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(place, _activated(value, KIND).to(x.dtype.element_ty), mask=inside)


def activate(x: Tensor, bias: Tensor | None, kind: str) -> None:
    """See `kernels.activate`."""
    rows, width = x.shape
    _activate[_tiles(rows, width)](
        x,
        rows,
        width,
        x.stride(0),
        x if bias is None else bias,
        HAS_BIAS=bias is not None,
        KIND=kind,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _gated(
    gate,
    up,
    output,
    gate_bias,
    up_bias,
    rows,
    width,
    gate_row,
    up_row,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile; see `kernels.gated`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    opened = tl.load(gate + row[:, None] * gate_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    risen = tl.load(up + row[:, None] * up_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        opened += tl.load(gate_bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        risen += tl.load(up_bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    result = _activated(opened, KIND) * risen
    tl.store(output + row[:, None] * width + column[None, :], result.to(output.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, kind: str) -> Tensor:
    """See `kernels.gated`."""
    rows, width = gate.shape
    output = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    gate_bias, up_bias = biases or (gate, gate)
    _gated[_tiles(rows, width)](
        gate,
        up,
        output,
        gate_bias,
        up_bias,
        rows,
        width,
        gate.stride(0),
        up.stride(0),
        HAS_BIAS=biases is not None,
        KIND=kind,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return output


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    x_row,
    angle_row,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """All heads of one row; see `kernels.rotate`."""
    row = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HALF)
    inside = (head < HEADS)[:, None] & (half < HALF)[None, :]
    cosine = tl.load(cos + row * angle_row + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + row * angle_row + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    place = x + row * x_row + head[:, None] * SIZE + half[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * cosine - second * sine).to(x.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * cosine + first * sine).to(x.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `kernels.rotate`."""
    rows, heads, size = x.shape
    half = cos.shape[-1] // 2
    _rotate[(rows,)](
        x,
        cos,
        sin,
        x.stride(0),
        cos.stride(0),
        HEADS=heads,
        SIZE=size,
        HALF=half,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=4,
    )


def _tiles(rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS)
