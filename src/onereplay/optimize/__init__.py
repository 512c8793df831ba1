"""Exact rewrites of a tower's modules, one a file: the same result up to rounding, from faster kernels.

A rewrite looks through the vision modules and gives, for each module that it knows better, a replacement of `forward`.
`Rewritten` puts the replacements in place for the length of a `with` block: the adapter's own forward (captured or
eager) runs them, and a call of the stock model runs the stock code. Forward hooks are off inside the block: a replay
would not run them, and those that transformers installs to collect hidden states keep `torch.compile` from whole
blocks.

| name | what it replaces |
|---|---|
| `patch_embedding` | a convolution whose kernel is its stride, over rows that are patches already: one matrix product |
| `aligned_mlp` | a gated MLP whose width is no multiple of 64: the same with zero rows and columns added |
| `compiled_blocks` | a block: `torch.compile`, once for all budgets; CUDA graphs only |
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from onereplay.config import REWRITES
from onereplay.errors import ConfigError
from onereplay.optimize.aligned_mlp import aligned_mlp, unalign
from onereplay.optimize.compiled_blocks import compiled_blocks
from onereplay.optimize.patch_embedding import patch_embedding

Forwards = Mapping[nn.Module, Callable[..., Any]]


def choose(names: Sequence[str] | None, device: torch.device, backend: str) -> tuple[str, ...]:
    """The rewrites to apply; `None` is all of them under CUDA graphs and none elsewhere.

    Raises:
        ConfigError: `compiled_blocks` without CUDA graphs: a trace cannot hold compiled code.
    """
    graphs = backend == "cuda" or (backend == "auto" and device.type == "cuda")
    if names is None:
        return REWRITES if graphs else ()
    if "compiled_blocks" in names and not graphs:
        raise ConfigError("optimize='compiled_blocks' needs backend='cuda' on a CUDA device; leave it out")
    return tuple(names)


class Rewritten:
    """Replacements of `forward` for the modules below some roots; a reusable context manager.

    Args:
        roots: the vision modules.
        names: which rewrites.
        blocks: the modules that `compiled_blocks` compiles.
    """

    def __init__(self, roots: Iterable[nn.Module], names: Sequence[str], blocks: Iterable[nn.Module] = ()) -> None:
        self._roots = list(roots)
        self.forwards: dict[nn.Module, Callable[..., Any]] = {}
        modules = [module for root in self._roots for module in root.modules()]
        self._modules, self._hooks = modules, dict[nn.Module, Any]()
        if "patch_embedding" in names:
            self.forwards |= patch_embedding(modules)
        if "aligned_mlp" in names:
            self.forwards |= aligned_mlp(modules)
        if "compiled_blocks" in names:
            self.forwards |= compiled_blocks(blocks)

    def __enter__(self) -> Self:
        for module, forward in self.forwards.items():
            module.__dict__["forward"] = forward
        for module in self._modules:
            if module._forward_hooks:
                self._hooks[module] = module._forward_hooks
                module._forward_hooks = OrderedDict()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module in self.forwards:
            module.__dict__.pop("forward", None)
        while self._hooks:
            module, hooks = self._hooks.popitem()
            module._forward_hooks = hooks

    def restore(self) -> None:
        """Give the weights the storage that they had in kind: dense, of their own. Values never changed."""
        for root in self._roots:
            unalign(root.modules())
        self.forwards = {}
