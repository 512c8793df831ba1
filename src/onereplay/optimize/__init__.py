"""Exact rewrites of a tower's modules, one a file: the same result up to rounding, from faster kernels.

A rewrite looks through the vision modules and gives, for each module that it knows better, a replacement of `forward`.
`Rewritten` puts the replacements in place. An adapter does that in its own copies of the modules, which share the
weights: a call of the stock model runs the stock code.

| name | what it replaces |
|---|---|
| `patch_embedding` | a convolution whose kernel is its stride, over rows that are patches already: one matrix product |
| `aligned_mlp` | a gated MLP whose width is no multiple of 64: the same with zero rows and columns added |
| `compiled_blocks` | a block: `torch.compile`, once for all budgets; CUDA graphs only |
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
    """Replacements of `forward` for the modules below some roots, in place from here on.

    Args:
        roots: an adapter's own copies of the vision modules.
        names: which rewrites.
        blocks: the modules that `compiled_blocks` compiles.
        tiles: their hidden states are tiles of a fixed size.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        names: Sequence[str],
        blocks: Iterable[nn.Module] = (),
        tiles: bool = False,
    ) -> None:
        self._roots, self.names = list(roots), tuple(names)
        self.forwards: dict[nn.Module, Callable[..., Any]] = {}
        modules = [module for root in self._roots for module in root.modules()]
        if "patch_embedding" in names:
            self._replace(patch_embedding(modules))
        if "aligned_mlp" in names:
            self._replace(aligned_mlp(modules))
        if "compiled_blocks" in names:
            self._replace(compiled_blocks(blocks, tiles))

    def _replace(self, forwards: Forwards) -> None:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        self.forwards |= forwards

    def restore(self) -> None:
        """Give the modules their own `forward`, and the weights the storage that they had in kind: dense, of their own.
        Values never changed."""
        for module in self.forwards:
            module.__dict__.pop("forward", None)
        for root in self._roots:
            unalign(root.modules())
        self.forwards = {}
