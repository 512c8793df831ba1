"""A model small enough to check by hand, for the tests of the core: rows of patches, sequences that see only
themselves, and a token of every two patches.

For a sequence of patches `x` the rows are `h = (x + mean(x)) @ weight + scale * place`, where `place` numbers the
patches of a sequence from 1. Tokens are sums of two neighbouring rows, in the reverse order of their item. `expected`
says the same thing with loops, in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.buffers import Buffers, Declaration, Offsets, Output, Packed, Rows, Staged, Tail
from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.plan import Capacity
from onereplay.core.protocol import PathSpec

WIDTH = 6
MERGE = 2
"""Patches of a token."""

DECLARATIONS: tuple[Declaration, ...] = (
    Staged("pixels", "patches", (WIDTH,)),
    Rows("places", "patches", dtype=torch.int32),
    Rows("order", "tokens", shift="tokens", tail=Tail.IDENTITY),
    Offsets("cu_seqlens", of="sequences", longest_dummy=64),
)
OUTPUTS = (Output("features", "tokens", (WIDTH,)), Output("squares", "patches", ()))


@dataclass(frozen=True)
class Picture:
    """One item: for each path that it uses, the patches of its sequences `(patches, WIDTH)`."""

    sequences: Mapping[str, tuple[Tensor, ...]]
    unsupported: str = ""


@dataclass(frozen=True)
class DummyBatch:
    items: tuple[Item, ...]
    pictures: tuple[Picture, ...]


def size_of(sequences: Sequence[Tensor]) -> PathSize:
    lengths = [len(sequence) for sequence in sequences]
    return PathSize(sum(lengths) // MERGE, sum(lengths), len(lengths), longest=max(lengths))


def picture(
    generator: torch.Generator, *tokens: int, path: str = "main", dtype: torch.dtype = torch.float32
) -> Picture:
    """A picture of random patches, one sequence for each number of tokens."""
    return Picture(
        {path: tuple(torch.randn(n * MERGE, WIDTH, generator=generator).to(dtype) for n in tokens)},
    )


def both(first: Picture, second: Picture) -> Picture:
    """One picture that uses the paths of two."""
    return Picture({**first.sequences, **second.sequences})


def batch_of(*pictures: Picture) -> DummyBatch:
    items = tuple(
        Item(
            Modality.IMAGE,
            {path: size_of(sequences) for path, sequences in each.sequences.items()},
            each.unsupported,
        )
        for each in pictures
    )
    return DummyBatch(items, pictures)


@dataclass
class DummyAdapter:
    """`SupportsEncoderCudaGraph` with plain tensors."""

    names: tuple[str, ...] = ("main",)
    dtype: torch.dtype = torch.float32
    scale: float = 0.125
    sequence_slots: int = 1000
    before_forward: Callable[[str, Buffers], None] = lambda path, buffers: None
    """Called at the start of each forward, capture and eager alike."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    forwards: list[tuple[str, int]] = field(default_factory=list)
    """Path and patches of each run of the Python code."""
    rows: dict[str, Sequence[Tensor]] = field(default_factory=dict)
    """What the last batch was assembled from."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator).to(self.dtype).requires_grad_()
        self.weights = [self.weight]

    def paths(self) -> Mapping[str, PathSpec]:
        return {name: PathSpec(DECLARATIONS, OUTPUTS) for name in self.names}

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        return [
            Capacity(
                tokens=tokens,
                patches=tokens * MERGE,
                sequences=min(tokens, self.sequence_slots),
                items=min(tokens, config.items_bound),
                longest=tokens * MERGE,
            )
            for tokens in config.ladder(16_384)
        ]

    def pack(self, path: str, batch: DummyBatch) -> Packed:
        used = [each.sequences[path] for each in batch.pictures if path in each.sequences]
        return Packed(
            sizes=[size_of(sequences) for sequences in used],
            pieces=[
                {
                    "places": np.concatenate([np.arange(1, len(part) + 1) for part in sequences]),
                    "order": np.arange(size_of(sequences).tokens)[::-1],
                    "cu_seqlens": np.array([len(part) for part in sequences], dtype=np.int64),
                }
                for sequences in used
            ],
            staged={"pixels": [part for sequences in used for part in sequences]},
        )

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        self.before_forward(path, buffers)
        self.forwards.append((path, len(buffers.pixels)))
        pixels, offsets = buffers.pixels, buffers.cu_seqlens
        row = torch.arange(len(pixels), dtype=torch.int32)
        sequence = torch.searchsorted(offsets[1:], row, right=True)
        sums = torch.zeros(len(offsets), WIDTH, dtype=pixels.dtype).index_add(0, sequence, pixels)
        lengths = offsets.diff().clamp(min=1)
        hidden = (pixels + sums[sequence] / lengths[sequence].unsqueeze(1)) @ self.weight
        hidden = hidden + self.scale * buffers.places.unsqueeze(1).to(hidden.dtype)
        tokens = hidden.view(-1, MERGE, WIDTH).sum(1)
        return tokens[buffers.order], hidden.square().sum(1)

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: DummyBatch) -> list[Tensor]:
        """The tokens of each item, those of the first path first."""
        self.rows = dict(rows)
        split: dict[str, list[Tensor]] = {}
        for path, (features, _) in rows.items():
            sizes = [item.sizes[path].tokens for item in batch.items if path in item.sizes]
            split[path] = list(features.split(sizes))
        return [torch.cat([split[path].pop(0) for path in self.names if path in item.sizes]) for item in batch.items]

    def expected(self, batch: DummyBatch) -> list[Tensor]:
        """What `encode` must give, one sequence after the other, in float64."""
        return [
            torch.cat([self._tokens_of(each.sequences[path]) for path in self.names if path in each.sequences])
            for each in batch.pictures
        ]

    def _tokens_of(self, sequences: Sequence[Tensor]) -> Tensor:
        rows = []
        for part in sequences:
            x = part.to(self.dtype).double()
            places = torch.arange(1, len(x) + 1, dtype=torch.float64).unsqueeze(1)
            rows.append((x + x.mean(0)) @ self.weight.detach().double() + self.scale * places)
        hidden = torch.cat(rows)
        return torch.stack([hidden[i : i + MERGE].sum(0) for i in range(0, len(hidden), MERGE)]).flip(0)
