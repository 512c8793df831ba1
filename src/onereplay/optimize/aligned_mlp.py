"""A gated MLP with its inner width padded to the hardware's alignment.

Tensor cores read rows of 16 bytes; Qwen2.5-VL's 3,420 columns of bf16 start every other row off that. Measured on an
H200, 20,480 rows: 1280 to 3420 at 197 TFLOP/s, 1280 to 3424 at 708. Zero rows are added to gate and up, zero columns to
down: the added inner values are `act(0) * 0 = 0` and add nothing.

The padded weights replace the storage of the module's own (`storage`): no second copy is held.
"""

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from onereplay.core.budgets import round_up
from onereplay.optimize.stock import is_stock
from onereplay.optimize.storage import Storage

ALIGNMENT = 64
_MARK = "_onereplay_padded"
_PARTS = ("gate_proj", "up_proj", "down_proj")


def aligned_mlp(modules: Iterable[nn.Module], storage: Storage) -> dict[nn.Module, Callable[..., Any]]:
    """Replacements for modules of `gate_proj`, `up_proj`, `down_proj` and `act_fn` whose width is misaligned.

    A module with other parts is something else: GLM's merger projects and normalises first.
    """
    return {module: _aligned(module, storage) for module in modules if _is_misaligned(module)}


def _is_misaligned(module: Any) -> bool:
    parts: list[Any] = [getattr(module, name, None) for name in _PARTS]
    if not all(isinstance(part, nn.Linear) and part.weight.is_floating_point() for part in parts):
        return False
    if not is_stock(module, *parts):
        return False
    others = {name for name, _ in module.named_children()} - {*_PARTS, "act_fn"}
    return hasattr(module, "act_fn") and not others and bool(module.gate_proj.out_features % ALIGNMENT)


def _aligned(module: Any, storage: Storage) -> Callable[..., Any]:
    width = round_up(module.gate_proj.out_features, ALIGNMENT)
    gate, up = (_padded_rows(part, width, storage) for part in (module.gate_proj, module.up_proj))
    down = module.down_proj.weight
    storage.mark(module, _MARK, (*gate, *up, storage.pad(down, (len(down), width))))
    return MethodType(_forward, module)


def _forward(self: Any, hidden: Tensor) -> Tensor:
    """The padded weights are attributes and not bound arguments: `torch.compile` then shares one graph among blocks."""
    gate, gate_bias, up, up_bias, down = self._onereplay_padded
    inner = self.act_fn(linear(hidden, gate, gate_bias)) * linear(hidden, up, up_bias)
    return linear(inner, down, self.down_proj.bias)


def _padded_rows(part: nn.Linear, width: int, storage: Storage) -> tuple[Tensor, Tensor | None]:
    """The weight and bias with zeros up to `width` rows."""
    bias = None if part.bias is None else storage.pad(part.bias, (width,))
    return storage.pad(part.weight, (width, part.in_features)), bias
