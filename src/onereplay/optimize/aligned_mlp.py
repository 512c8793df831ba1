"""A gated MLP with its inner width padded to the hardware's alignment.

Tensor cores read rows of 16 bytes; Qwen2.5-VL's 3,420 columns of bf16 start every other row off that. Measured on an
H200, 20,480 rows: 1280 to 3420 at 197 TFLOP/s, 1280 to 3424 at 708. Zero rows are added to gate and up, zero columns to
down: the added inner values are `act(0) * 0 = 0` and add nothing.

The padded weights replace the storage of the module's own, which become views of them: no second copy is held, and a
change of the weights in place reaches both. Several encoders of one model share the padded weights; `unalign` by the
last of them gives the weights dense storage of their own again.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary

from onereplay.core.budgets import round_up

ALIGNMENT = 64
_MARK = "_onereplay_padded"
_PARTS = ("gate_proj", "up_proj", "down_proj")


def aligned_mlp(modules: Iterable[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """Replacements for modules of `gate_proj`, `up_proj`, `down_proj` and `act_fn` whose width is misaligned.

    A module with other parts is something else: GLM's merger projects and normalises first.
    """
    return {module: _aligned(module) for module in modules if _is_misaligned(module)}


def unalign(modules: Iterable[nn.Module]) -> None:
    """Give the padded weights of these modules back; the last user gives a weight dense storage of its own again."""
    for module in modules:
        if module.__dict__.pop(_MARK, None):
            for name in _PARTS:
                for parameter in getattr(module, name).parameters():
                    _release(parameter)


def _is_misaligned(module: Any) -> bool:
    parts = [getattr(module, name, None) for name in _PARTS]
    if not all(isinstance(part, nn.Linear) and part.weight.is_floating_point() for part in parts):
        return False
    others = {name for name, _ in module.named_children()} - {*_PARTS, "act_fn"}
    return hasattr(module, "act_fn") and not others and bool(module.gate_proj.out_features % ALIGNMENT)


def _aligned(module: Any) -> Callable[..., Any]:
    width = round_up(module.gate_proj.out_features, ALIGNMENT)
    gate, up = (_padded_rows(part, width) for part in (module.gate_proj, module.up_proj))
    module.__dict__[_MARK] = (*gate, *up, _padded_columns(module.down_proj, width))
    return MethodType(_forward, module)


def _forward(self: Any, hidden: Tensor) -> Tensor:
    """The padded weights are attributes and not bound arguments: `torch.compile` then shares one graph among blocks."""
    gate, gate_bias, up, up_bias, down = self._onereplay_padded
    inner = self.act_fn(linear(hidden, gate, gate_bias)) * linear(hidden, up, up_bias)
    return linear(inner, down, self.down_proj.bias)


def _padded_rows(part: nn.Linear, width: int) -> tuple[Tensor, Tensor | None]:
    """The weight and bias with zero rows up to `width`; the module's own become views of their first rows."""
    weight = _padded(part.weight, (width, part.in_features))
    bias = None if part.bias is None else _padded(part.bias, (width,))
    return weight, bias


def _padded_columns(part: nn.Linear, width: int) -> Tensor:
    return _padded(part.weight, (part.out_features, width))


@dataclass
class _Shared:
    """A padded tensor that a parameter is a view of, and how many aligned modules read it."""

    padded: Tensor
    users: int = 0


_shared = WeakIdKeyDictionary()
"""By parameter: encoders of one model share its weights, and the padded ones with them."""
_shared_lock = threading.Lock()


def _padded(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    with _shared_lock, torch.inference_mode(False), torch.no_grad():
        shared: _Shared | None = _shared.get(parameter)
        if shared is None or shared.padded.data_ptr() != parameter.data_ptr():
            padded = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            view = padded[tuple(slice(side) for side in parameter.shape)]
            view.copy_(parameter)
            parameter.data = view
            shared = _shared[parameter] = _Shared(padded)
        shared.users += 1
        return shared.padded


def _release(parameter: Tensor) -> None:
    with _shared_lock:
        shared: _Shared | None = _shared.get(parameter)
        if shared is None:
            return
        shared.users -= 1
        if not shared.users:
            del _shared[parameter]
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
