"""Exact rewrites of a tower's modules, one a file: the same result up to rounding, from faster kernels.

A rewrite looks through the vision modules and gives, for each module that it knows better, a replacement of `forward`.
`Rewritten` puts the replacements in place. An adapter does that in its own copies of the modules, which share the
weights: a call of the stock model runs the stock code.

| name | what it replaces |
|---|---|
| `patch_embedding` | a convolution whose kernel is its stride, over rows that are patches already: one matrix product |
| `aligned_mlp` | a gated MLP whose width is no multiple of 64: the same with zero rows and columns added |
| `fused_blocks` | a block of a kind that is known: few products and one pass between each |
| `compiled_blocks` | any other block: `torch.compile`, once for all budgets; CUDA graphs only |
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onereplay.config import REWRITES
from onereplay.errors import ConfigError
from onereplay.optimize.aligned_mlp import aligned_mlp
from onereplay.optimize.compiled_blocks import compiled_blocks
from onereplay.optimize.fused_blocks import fused_blocks, fused_norms
from onereplay.optimize.patch_embedding import patch_embedding
from onereplay.optimize.storage import Storage

Forwards = Mapping[nn.Module, Callable[..., Any]]


def choose(names: Sequence[str] | None, device: torch.device, backend: str) -> tuple[str, ...]:
    """The rewrites to apply; `None` is all of them under CUDA graphs and none elsewhere.

    Raises:
        ConfigError: `compiled_blocks` without CUDA graphs, or `fused_blocks` traced on a CUDA device: a trace cannot
            hold compiled code.
    """
    graphs = backend == "cuda" or (backend == "auto" and device.type == "cuda")
    if names is None:
        return REWRITES if graphs else ()
    if "compiled_blocks" in names and not graphs:
        raise ConfigError("optimize='compiled_blocks' needs backend='cuda' on a CUDA device; leave it out")
    if "fused_blocks" in names and device.type == "cuda" and not graphs:
        raise ConfigError("optimize='fused_blocks' runs kernels that no trace can hold; leave it out on a CUDA device")
    return tuple(names)


class Rewritten:
    """Replacements of `forward` for the modules below some roots, in place from here on.

    Args:
        roots: an adapter's own copies of the vision modules.
        names: which rewrites.
        blocks: the modules that `fused_blocks` and `compiled_blocks` look at.
        tiles: their hidden states are tiles of a fixed size.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        names: Sequence[str],
        blocks: Iterable[nn.Module] = (),
        tiles: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.forwards: dict[nn.Module, Callable[..., Any]] = {}
        self._storage = Storage()
        weakref.finalize(self, self._storage.release_if_free).atexit = False  # an encoder that nobody closed
        modules, blocks = [module for root in roots for module in root.modules()], list(blocks)
        if "patch_embedding" in names:
            self._replace(patch_embedding(modules))
        if "fused_blocks" in names:
            self._replace(fused_blocks(blocks, self._storage))
            blocks = [block for block in blocks if block not in self.forwards]
            inside = {module for block in self.forwards for module in block.modules()}
            modules = [module for module in modules if module not in inside]
            if inside:  # norms in other blocks are left to the compiler
                others = {module for block in blocks for module in block.modules()}
                self._replace(fused_norms(module for module in modules if module not in others))
        if "aligned_mlp" in names:
            self._replace(aligned_mlp(modules, self._storage))
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
        self._storage.release()
        self.forwards = {}
