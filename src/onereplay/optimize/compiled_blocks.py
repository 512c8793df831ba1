"""Blocks through `torch.compile`: norms, rotary embedding, activation and residuals become a few fused kernels.

Shapes are dynamic, so one compilation serves all budgets and the eager forward. Compilation happens in the warm-up
before the first capture; PyTorch keeps its results on disk, so a second start is quick. Measured on an H200,
Qwen2.5-VL-7B at 64 tokens in a graph with the other rewrites on: 4.68 ms before, 2.23 ms after
(`benchmarks/results/rewrites_h200_2026-11-29.md`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

VARIANTS = 64
"""Compiled variants that one function may have in this process, against PyTorch's 8. The layers of all models share a
few functions, and SAM alone has eight (windows or not, two sizes of tiles, one tile or several); beyond the limit
PyTorch runs a block uncompiled, with no more than a line in the log."""


def compiled_blocks(blocks: Iterable[nn.Module], tiles: bool) -> dict[nn.Module, Callable[..., Any]]:
    """A compiled `forward` for each block.

    Args:
        blocks: of one tower or several.
        tiles: hidden states are `(tiles, ...)` of fixed sizes behind the first; else `(..., rows, width)`. What is
            fixed is compiled as a number: with sizes as symbols Inductor may search for minutes (24x24 patches a tile
            took 103 s on a busy CPU with two cores, 33 s so).
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return {block: _with_fixed_sizes(torch.compile(block.forward, dynamic=True), tiles) for block in blocks}


def _with_fixed_sizes(compiled: Callable[..., Any], tiles: bool) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor):
            for dimension in range(1 if tiles else hidden.ndim - 1, hidden.ndim):
                torch._dynamo.mark_static(hidden, dimension)
        return compiled(*args, **kwargs)

    return forward
