"""What a transformer block does between its matrix products, each as one pass over memory.

On CUDA these are kernels in Triton; elsewhere the same formulas in PyTorch, which the tests hold the kernels against.
All compute in float32 and round once. Names with an argument called `x` change it in place.
"""

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu")


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    *,
    rms: bool,
    branch: Tensor | None = None,
    scale: Tensor | None = None,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """The normalisation of `hidden = x + scale * (branch + before)`; `x` becomes `hidden + after`.

    Without a branch, hidden is `x + before`. What is `None` is left out; with nothing to add `x` stays untouched.

    Args:
        x: the residual stream `(rows, width)`, contiguous.
        weight: `(width,)`.
        bias: `(width,)`, or `None`.
        epsilon: added to the variance.
        rms: root mean square instead of layer normalisation.
        branch: `(rows, width)`, contiguous: what a branch gave without its bias.
        scale: `(width,)`: of the branch.
        before: `(width,)`: the branch's bias.
        after: `(width,)`: the bias of the branch that comes next, so that its product can be added to `x` as it is.

    Returns:
        `(rows, width)` in `x`'s dtype.
    """
    _assert_contiguous(x, branch)
    if x.is_cuda:
        from onereplay.optimize import triton_kernels

        return triton_kernels.norm(x, weight, bias, epsilon, rms, branch, scale, before, after)
    hidden = x.float()
    if branch is not None:
        hidden = hidden + _scaled(branch, before, scale)
    elif before is not None:
        hidden = hidden + before.float()
    centred = hidden if rms else hidden - hidden.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + epsilon) * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    if branch is not None or before is not None or after is not None:
        x.copy_(hidden if after is None else hidden + after.float())
    return normed.to(x.dtype)


def add(x: Tensor, branch: Tensor, bias: Tensor | None, scale: Tensor | None) -> None:
    """`x += scale * (branch + bias)`; shapes as in `norm`."""
    _assert_contiguous(x)
    if x.is_cuda:
        from onereplay.optimize import triton_kernels

        return triton_kernels.add(x, branch, bias, scale)
    x.copy_(x.float() + _scaled(branch, bias, scale))
    return None


def activate(x: Tensor, bias: Tensor | None, kind: str) -> None:
    """`x = kind(x + bias)` for `x` of `(rows, width)`; kinds are `ACTIVATIONS`."""
    if x.is_cuda:
        from onereplay.optimize import triton_kernels

        return triton_kernels.activate(x, bias, kind)
    x.copy_(_activated(x.float() if bias is None else x.float() + bias.float(), kind))
    return None


def gated(gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, kind: str) -> Tensor:
    """`kind(gate + bias) * (up + bias)`: `(rows, width)`, contiguous, from two of that shape with any row stride."""
    if gate.is_cuda:
        from onereplay.optimize import triton_kernels

        return triton_kernels.gated(gate, up, biases, kind)
    opened, risen = gate.float(), up.float()
    if biases is not None:
        opened, risen = opened + biases[0].float(), risen + biases[1].float()
    return (_activated(opened, kind) * risen).to(gate.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding in place: value i of a head with value `i + R / 2`, for the first R of D values.

    Args:
        x: `(rows, heads, D)`, heads and values contiguous.
        cos: `(rows, R)` whose two halves are equal.
        sin: the same.
    """
    if x.is_cuda:
        from onereplay.optimize import triton_kernels

        return triton_kernels.rotate(x, cos, sin)
    half = cos.shape[-1] // 2
    cosine, sine = cos[:, None, :half].float(), sin[:, None, :half].float()
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    x[..., : 2 * half] = rotated
    return None


def _assert_contiguous(*tensors: Tensor | None) -> None:
    """The kernels take rows that lie one behind the other; other strides would be read wrongly without a word."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"a kernel takes contiguous rows, got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )


def _scaled(branch: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    added = branch.float() if bias is None else branch.float() + bias.float()
    return added if scale is None else added * scale.float()


def _activated(x: Tensor, kind: str) -> Tensor:
    match kind:
        case "silu":
            return functional.silu(x)
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case _:
            return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
