"""The formulas of `optimize.kernels` against PyTorch's own modules; `tests/gpu` holds the kernels against the formulas.

Tolerance: float32, the same sums in another order.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onereplay.optimize import kernels

TOLERANCE = 1e-5
ROWS, WIDTH = 7, 24


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1))


@pytest.mark.parametrize("rms", [True, False])
def test_a_norm_alone_is_the_module_and_leaves_its_input_as_it_was(rms: bool) -> None:
    x = random(ROWS, WIDTH)
    before = x.clone()
    module = nn.RMSNorm(WIDTH, eps=1e-6) if rms else nn.LayerNorm(WIDTH, eps=1e-6)
    module.weight.data = random(WIDTH, seed=1)
    bias = None if rms else random(WIDTH, seed=2)
    if isinstance(module, nn.LayerNorm) and bias is not None:
        module.bias.data = bias
    assert close(kernels.norm(x, module.weight.data, bias, 1e-6, rms=rms), module(before))
    assert torch.equal(x, before)


def test_a_norm_adds_a_scaled_branch_with_its_bias_to_the_stream() -> None:
    x, branch, scale, bias, weight = (
        random(ROWS, WIDTH),
        random(ROWS, WIDTH, seed=1),
        *(random(WIDTH, seed=seed) for seed in (2, 3, 4)),
    )
    hidden = x + scale * (branch + bias)
    found = kernels.norm(x, weight, None, 1e-6, rms=True, branch=branch, scale=scale, before=bias)
    assert close(found, functional.rms_norm(hidden, (WIDTH,), weight, 1e-6))
    assert close(x, hidden)


def test_a_norm_leaves_the_bias_that_comes_next_in_the_stream_but_not_in_its_result() -> None:
    x, weight, before, after = random(ROWS, WIDTH), *(random(WIDTH, seed=seed) for seed in (1, 2, 3))
    hidden = x + before
    found = kernels.norm(x, weight, None, 1e-6, rms=True, before=before, after=after)
    assert close(found, functional.rms_norm(hidden, (WIDTH,), weight, 1e-6))
    assert close(x, hidden + after)


def test_rows_that_do_not_lie_one_behind_the_other_are_refused() -> None:
    """A kernel would read them wrongly without a word."""
    with pytest.raises(ValueError, match=r"contiguous rows, got shape \(24, 7\), strides \(1, 24\)"):
        kernels.norm(random(ROWS, WIDTH).t(), random(ROWS), None, 1e-6, rms=True)


def test_add_scales_the_branch_and_its_bias() -> None:
    x, branch, bias, scale = random(ROWS, WIDTH), random(ROWS, WIDTH, seed=1), random(WIDTH), random(WIDTH, seed=2)
    expected = x + scale * (branch + bias)
    kernels.add(x, branch, bias, scale)
    assert close(x, expected)


STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("kind", kernels.ACTIVATIONS)
def test_activations_are_those_of_pytorch_with_the_bias_first(kind: str) -> None:
    x, up, biases = random(ROWS, WIDTH), random(ROWS, WIDTH, seed=1), (random(WIDTH, seed=2), random(WIDTH, seed=3))
    expected = STOCK[kind](x + biases[0])
    assert close(kernels.gated(x, up, biases, kind), expected * (up + biases[1]))
    kernels.activate(x, biases[0], kind)
    assert close(x, expected)


@pytest.mark.parametrize("rotated", [8, 6])
def test_rotary_embedding_is_that_of_transformers_and_leaves_the_rest_of_a_head(rotated: int) -> None:
    """By its formula: `x * cos + rotate_half(x) * sin`, over the first values of a head."""
    x, angles = random(ROWS, 3, 8), random(ROWS, rotated // 2, seed=1)
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    head, rest = x[..., :rotated].clone(), x[..., rotated:].clone()
    half = torch.cat([-head[..., rotated // 2 :], head[..., : rotated // 2]], dim=-1)
    kernels.rotate(x, cos, sin)
    assert close(x[..., :rotated], head * cos[:, None] + half * sin[:, None])
    assert torch.equal(x[..., rotated:], rest)
