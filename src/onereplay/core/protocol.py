"""What the core asks of a model: the one seam between integers and modules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.buffers import Buffers, Declaration, Output, Packed
from onereplay.core.items import Item
from onereplay.core.plan import Capacity


@dataclass(frozen=True)
class PathSpec:
    """One independently captured part of an encoder: what it reads and what it gives."""

    buffers: tuple[Declaration, ...]
    outputs: tuple[Output, ...]


class Batch(Protocol):
    """An adapter's own typed batch; the core reads its items alone."""

    @property
    def items(self) -> Sequence[Item]:
        """What each item asks of each path, in the caller's order."""
        ...


BatchT = TypeVar("BatchT", bound=Batch)
_BatchT = TypeVar("_BatchT", bound=Batch, contravariant=True)


class SupportsEncoderCudaGraph(Protocol[_BatchT]):
    """One model under the rule. `forward` serves capture, replay and eager alike: there is no second path."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    @property
    def weights(self) -> Sequence[Tensor]:
        """All weights, as the user's model has them now; no batch gives a result once one lies elsewhere than at
        capture. Read beside every replay."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of pixels and outputs."""
        ...

    def paths(self) -> Mapping[str, PathSpec]:
        """The encoder's paths and their buffers."""
        ...

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """What to capture for a path, ascending: a pure function of the model's configuration and the options."""
        ...

    def pack(self, path: str, batch: _BatchT) -> Packed:
        """The host side of one path of a batch: metadata arrays and the tensors that hold the pixels."""
        ...

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The path's results, one tensor for each declared output, in their order.

        Args:
            path: which path.
            buffers: the declared tensors: static ones of a captured shape, or exact-size ones.
            bounds: for each declared `Offsets`, a host integer that no sequence exceeds.
        """
        ...

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: _BatchT) -> list[Tensor]:
        """One tensor an item, in the caller's order, from the paths' real rows (which the caller owns already)."""
        ...
