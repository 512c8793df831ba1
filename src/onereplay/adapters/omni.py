"""Models with a tower for each kind of input: pictures and sound, each with its own graphs.

A tower is an adapter by itself, made from the configuration alone; its path is a path of the model, and it runs the
copies of the modules that the model's adapter holds. A batch may mix the kinds: it is one replay, or one eager forward,
on each path that it uses. An item goes through one tower; a video and its sound are two items.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onereplay.adapters.base import Adapter, refuse_unknown
from onereplay.adapters.packed import PackedAdapter, PackedBatch
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.buffers import Buffers, Packed
from onereplay.core.items import Item
from onereplay.core.plan import Capacity
from onereplay.core.protocol import PathSpec
from onereplay.errors import UnsupportedModelError
from onereplay.geometry import Grid


@dataclass(frozen=True)
class OmniBatch:
    """Items of a model of several towers."""

    items: tuple[Item, ...]
    parts: Mapping[str, PackedBatch]
    """By path, of every tower: its items in their order."""


class OmniAdapter(Adapter[OmniBatch]):
    """What models of several packed towers share.

    Capacity rule: that of each tower, on its path. The budgets of the options are those of every path, and graphs of
    all paths share one memory pool.
    """

    engine = "packed"
    kinds: ClassVar[tuple[type[PackedAdapter], ...]]
    """The towers, in the order of their items in a batch."""

    @cached_property
    def towers(self) -> Mapping[str, PackedAdapter]:
        """The towers by path."""
        made = {kind.path: kind(self.config, attention=self.attention) for kind in self.kinds}
        for tower in made.values():
            tower.own = self.own
        return made

    @abstractmethod
    def path_of(self, grid: Grid) -> str:
        """The path that an example of this grid is for; the towers' `layouts` make such grids."""

    def of_entry(self, name: str) -> Adapter[Any]:
        """The tower that an entry point belongs to."""
        return next(tower for tower in self.towers.values() if name in tower.entry_points)

    def inputs_of(self, path: str) -> list[str]:
        """The inputs that a tower takes."""
        return list(dict.fromkeys(name for names in self.towers[path].entry_points.values() for name in names))

    # sizes, for benchmarks

    @property
    def merge(self) -> int:
        """Of the first tower."""
        return self.towers[self.kinds[0].path].merge

    @property
    def max_sequence_patches(self) -> int | None:
        """Of the first tower."""
        return self.towers[self.kinds[0].path].max_sequence_patches

    def size(self, grid: Grid) -> Any:
        """What one grid asks of its tower."""
        return self.towers[self.path_of(grid)].size(grid)

    # The core's side

    def unit(self, path: str) -> int:
        """That of the tower."""
        return self.towers[path].unit(path)

    def paths(self) -> Mapping[str, PathSpec]:
        """A path for each tower."""
        return {path: tower.paths()[path] for path, tower in self.towers.items()}

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """Those of the tower."""
        return self.towers[path].capacities(path, config)

    def pack(self, path: str, batch: OmniBatch) -> Packed:
        """The items of one tower."""
        return self.towers[path].pack(path, batch.parts[path])

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: OmniBatch) -> list[Tensor]:
        """Each item's rows, in the order of the batch."""
        found = {path: iter(self.towers[path].assemble({path: rows[path]}, batch.parts[path])) for path in rows}
        return [next(found[_path(item)]) for item in batch.items]

    # Batches

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From the sizes that the towers take, in the order of the towers."""
        return tuple(
            item for path, given in self._sorted(sizes).items() for item in self.towers[path].items_of(**given)
        )

    def batch(self, **inputs: Any) -> OmniBatch:
        """From what the towers take; items come in the order of the towers."""
        parts = {path: self.towers[path].batch(**given) for path, given in self._sorted(inputs).items()}
        return OmniBatch(tuple(item for part in parts.values() for item in part.items), parts)

    def _sorted(self, inputs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The inputs of each tower."""
        names = {path: self.inputs_of(path) for path in self.towers}
        given = refuse_unknown(inputs, [name for known in names.values() for name in known], self.model_type)
        return {path: {name: given[name] for name in known if name in given} for path, known in names.items()}

    def join(self, batches: Sequence[OmniBatch]) -> OmniBatch:
        """Items one behind the other, also within each tower."""
        parts = {path: tower.join([batch.parts[path] for batch in batches]) for path, tower in self.towers.items()}
        return OmniBatch(tuple(item for batch in batches for item in batch.items), parts)

    def select(self, batch: OmniBatch, chosen: Sequence[int]) -> OmniBatch:
        """Items with what their towers have of them."""
        seen: Counter[str] = Counter()
        places = []
        for item in batch.items:
            places.append(seen[_path(item)])
            seen[_path(item)] += 1
        items = tuple(batch.items[place] for place in chosen)
        parts = {
            path: tower.select(
                batch.parts[path], [places[place] for place in chosen if _path(batch.items[place]) == path]
            )
            for path, tower in self.towers.items()
        }
        return OmniBatch(items, parts)

    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """Those of the tower."""
        return self.towers[path].layouts(path, tokens, max_items)

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Inputs of every tower that a grid is for."""
        inputs: dict[str, Tensor] = {}
        for path, tower in self.towers.items():
            own = [grid for grid in grids if self.path_of(grid) == path]
            inputs |= tower.example_inputs(own, generator) if own else {}
        return inputs

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Those of every tower."""
        return [block for tower in self.towers.values() for block in tower.blocks()]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's."""
        return self.towers[path].forward(path, buffers, bounds)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """There is one for each tower, see `of_entry`."""
        raise UnsupportedModelError(
            f"{self.model_type} has towers of several kinds; ask of_entry(name) for one of them"
        )


def _path(item: Item) -> str:
    """The one path of an item."""
    return next(iter(item.sizes))
