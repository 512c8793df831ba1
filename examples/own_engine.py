"""The core of onereplay inside an engine of your own: any object that satisfies `SupportsEncoderCudaGraph`.

    python examples/own_engine.py

No transformers model is involved. The toy encoder is one layer of attention with random weights; `ToyAdapter` is all
that the core needs to know of it. Runs under CUDA graphs on a GPU and under traced graphs without one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onereplay import EncoderCudaGraphConfig, EncoderCudaGraphManager
from onereplay.attention import varlen_attention
from onereplay.core.assembly import split_rows
from onereplay.core.buffers import Buffers, Offsets, Output, Packed, Staged
from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.plan import Capacity
from onereplay.core.protocol import PathSpec

PATCH, HEADS, HEAD = 48, 2, 64
WIDTH = HEADS * HEAD


@dataclass(frozen=True)
class Pictures:
    """A batch: the patches of each picture `(P, PATCH)`, and what each asks of the encoder."""

    items: tuple[Item, ...]
    patches: tuple[Tensor, ...]


class ToyAdapter:
    """One token a patch; a patch sees the patches of its own picture."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        self.weight = (torch.randn(PATCH, 3 * WIDTH, generator=generator) / PATCH**0.5).to(device, self.dtype)
        self.weights = [self.weight]

    def batch(self, patches: Sequence[Tensor]) -> Pictures:
        """Sizes are known on the host: nothing is read from the device."""
        sizes = [PathSize(len(rows), len(rows), sequences=1, longest=len(rows)) for rows in patches]
        return Pictures(tuple(Item(Modality.IMAGE, {"vision": size}) for size in sizes), tuple(patches))

    def paths(self) -> Mapping[str, PathSpec]:
        """What `forward` reads, and what it gives."""
        reads = (Staged("pixels", "patches", (PATCH,)), Offsets("cu_seqlens", of="sequences"))
        return {"vision": PathSpec(reads, (Output("features", "tokens", (WIDTH,)),))}

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """One captured graph a budget, and how much it holds in every dimension."""
        slots, items = config.sequence_slots, config.items_bound
        return [Capacity(n, n, min(n, slots), min(n, items), longest=n) for n in config.ladder(max_batch_tokens=4096)]

    def pack(self, path: str, batch: Pictures) -> Packed:
        """Lengths of sequences and pixels; the core adds offsets, padding and the copies."""
        sizes = [item.sizes[path] for item in batch.items]
        return Packed(sizes, [{"cu_seqlens": np.array([size.patches])} for size in sizes], {"pixels": batch.patches})

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Captured, replayed and run eagerly: the same code."""
        q, k, v = (buffers.pixels @ self.weight).view(-1, 3, HEADS, HEAD).unbind(1)
        mixed = varlen_attention(q, k, v, buffers.cu_seqlens, bounds["cu_seqlens"], HEAD**-0.5, "auto")
        return (mixed.flatten(1),)

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: Pictures) -> list[Tensor]:
        """One tensor a picture."""
        return split_rows(rows["vision"][0], [item.num_tokens for item in batch.items])


def main() -> None:
    """Two batches that are one replay each, and one that is one eager forward."""
    adapter = ToyAdapter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config = EncoderCudaGraphConfig(token_budgets=(64, 256))
    with EncoderCudaGraphManager(adapter, config) as manager:
        manager.capture()
        for sizes in ((40, 9), (100, 60, 31), (300,)):
            batch = adapter.batch([torch.randn(size, PATCH) for size in sizes])
            features = manager.encode(batch)
            alone = [manager.encode(adapter.batch([rows]))[0] for rows in batch.patches]
            apart = max(float((one - other).abs().max()) for one, other in zip(features, alone, strict=True))
            print(f"{[tuple(rows.shape) for rows in features]}  {manager.plan(batch)}")
            print(f"    largest difference from each picture by itself: {apart:.0e}")
        print(manager.report())


if __name__ == "__main__":
    main()
