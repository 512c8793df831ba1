"""The kernels of `optimize.kernels` on the device against the same formulas on the CPU, in float32 on the same numbers.

Tolerance: one rounding to bf16 of a result computed in float32, whose relative norm on random numbers is about
2^-9 / sqrt(3) = 1.1e-3 of each value; 2.5e-3 leaves room for the last place and for cancellation in sums.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from onereplay.optimize import kernels
from tests.gpu.conftest import relative_error

TOLERANCE = 2.5e-3
ROWS = (1, 300)
WIDTHS = (64, 1152, 1280, 3200)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def reference(function: Any, *tensors: Any, **options: Any) -> tuple[Any, list[Any]]:
    """The formula on the CPU, in float32; also the arguments, which it may have changed."""

    def exact(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(exact, value))
        return value.cpu().float() if isinstance(value, Tensor) else value

    copies = [exact(value) for value in tensors]
    return function(*copies, **{name: exact(value) for name, value in options.items()}), copies


def close(found: Tensor, exact: Tensor) -> bool:
    return relative_error(found.cpu(), exact) <= TOLERANCE


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("added", ["nothing", "biases", "branch"])
def test_norm(rows: int, width: int, rms: bool, added: str) -> None:
    more: dict[str, Tensor] = {
        "nothing": {},
        "biases": {"before": random(width), "after": random(width)},
        "branch": {"branch": random(rows, width), "scale": random(width), "before": random(width)},
    }[added]
    x, weight, bias = random(rows, width), random(width), None if rms else random(width)
    exact, (hidden, *_) = reference(kernels.norm, x, weight, bias, 1e-6, rms=rms, **more)
    assert close(kernels.norm(x, weight, bias, 1e-6, rms=rms, **more), exact)
    assert close(x, hidden)


@pytest.mark.parametrize("kind", kernels.ACTIVATIONS)
@pytest.mark.parametrize("width", [100, 3456, 4304])
@pytest.mark.parametrize("rows", ROWS)
def test_activations(rows: int, width: int, kind: str) -> None:
    gate_up, biases = random(rows, 2 * width), (random(width), random(width))
    gate, up = gate_up.split(width, 1)
    exact, _ = reference(kernels.gated, gate, up, biases, kind)
    assert close(kernels.gated(gate, up, biases, kind), exact)
    x = gate.contiguous()
    _, (activated, *_) = reference(kernels.activate, x, biases[0], kind)
    kernels.activate(x, biases[0], kind)
    assert close(x, activated)


@pytest.mark.parametrize("scaled", [True, False])
def test_add(scaled: bool) -> None:
    x, branch, bias, scale = random(300, 1000), random(300, 1000), random(1000), random(1000) if scaled else None
    _, (exact, *_) = reference(kernels.add, x, branch, bias, scale)
    kernels.add(x, branch, bias, scale)
    assert close(x, exact)


@pytest.mark.parametrize(("heads", "size", "rotated"), [(32, 80, 80), (24, 64, 64), (32, 80, 60), (12, 128, 128)])
def test_rotate(heads: int, size: int, rotated: int) -> None:
    qkv = random(300, heads + heads // 2, size)
    x, value = qkv[:, :heads], qkv[:, heads:].clone()
    angles = torch.rand(300, rotated // 2, device="cuda") * 6
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    _, (exact, *_) = reference(kernels.rotate, x, cos, sin)
    kernels.rotate(x, cos, sin)
    assert close(x, exact)
    assert torch.equal(qkv[:, heads:], value)
