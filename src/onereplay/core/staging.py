"""How one batch reaches the device: one asynchronous copy of metadata and one of each staged tensor (pixels).

The host writes into pinned blocks that take turns; an event guards each, so a block is never overwritten while a copy
still reads it. Nothing here reads the device.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from onereplay.core.buffers import Array, Buffers, Layout, Packed, Staged

TURNS = 3
"""Host blocks that take turns: the host may pack two batches ahead of the copies."""


class Block:
    """The bytes of one path in one place (host or device): a metadata block and one tensor for each `Staged`."""

    def __init__(
        self, layouts: Iterable[Layout], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
    ) -> None:
        layouts = list(layouts)
        with torch.inference_mode(False):
            self.metadata = torch.zeros(
                max(layout.num_bytes for layout in layouts), dtype=torch.uint8, device=device, pin_memory=pinned
            )
            self.staged = {
                declaration.name: torch.zeros(
                    max(getattr(layout.capacity, declaration.unit) for layout in layouts),
                    *declaration.shape,
                    dtype=dtype,
                    device=device,
                    pin_memory=pinned,
                )
                for declaration in layouts[0].declarations
                if isinstance(declaration, Staged)
            }

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.metadata.nbytes + sum(tensor.nbytes for tensor in self.staged.values())

    def tensors(self) -> list[Tensor]:
        """Every tensor of the block."""
        return [self.metadata, *self.staged.values()]


class _HostTurn:
    """One pinned block, its numpy views by layout, and the event that says its copies are done."""

    def __init__(self, block: Block, *, pinned: bool) -> None:
        self.block = block
        self.copied = torch.cuda.Event() if pinned else None
        self._views: dict[int, dict[str, Array]] = {}

    def views(self, layout: Layout) -> Mapping[str, Array]:
        if id(layout) not in self._views:
            views = layout.views(self.block.metadata)
            self._views[id(layout)] = {name: view.numpy() for name, view in views.items()}
        return self._views[id(layout)]


class Staging:
    """The host side of one path: loads batches into the static block of the device.

    Args:
        layouts: the layouts of all captured capacities, kept for the staging's life.
        dtype: the model's dtype; pixels are converted while they are copied into the pinned block.
        device: where the static block lies.
    """

    def __init__(self, layouts: Sequence[Layout], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._turns = [
            _HostTurn(Block(layouts, dtype, torch.device("cpu"), pinned=pinned), pinned=pinned)
            for _ in range(TURNS if pinned else 1)
        ]
        self._next = 0

    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory; 0 where nothing is pinned."""
        return sum(turn.block.num_bytes for turn in self._turns if turn.copied is not None)

    def load(self, packed: Packed, layout: Layout, into: Block) -> None:
        """Copy one batch into the static block, in the current stream: one copy of metadata, one for each `Staged`."""
        packed.check_staged(layout.declarations)
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        if turn.copied is not None:
            turn.copied.synchronize()
        layout.fill(turn.views(layout), packed)
        _copy_block(packed, layout, turn.block, into)
        if turn.copied is not None:
            turn.copied.record()


def exact_buffers(packed: Packed, layout: Layout, dtype: torch.dtype, device: torch.device) -> Buffers:
    """The buffers of an eager forward: of exactly the batch's size, newly allocated.

    Pixels that lie on the device in the model's dtype are taken as they are; others cross once, as in a replay.
    """
    packed.check_staged(layout.declarations)
    pinned = device.type == "cuda"
    metadata = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=pinned)
    layout.fill({name: view.numpy() for name, view in layout.views(metadata).items()}, packed)
    staged = {name: _exact_rows(sources, dtype, device) for name, sources in packed.staged.items()}
    return layout.buffers(metadata.to(device, non_blocking=True), staged)


def _exact_rows(sources: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    if any(source.device.type != "cpu" for source in sources):
        parts = [source.to(device, dtype, non_blocking=True) for source in sources]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    shape = (sum(len(source) for source in sources), *sources[0].shape[1:])
    host = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    _join(sources, host)
    return host.to(device, non_blocking=True)


def _copy_block(packed: Packed, layout: Layout, host: Block, device: Block) -> None:
    if layout.num_bytes:
        device.metadata[: layout.num_bytes].copy_(host.metadata[: layout.num_bytes], non_blocking=True)
    for name, target in device.staged.items():
        _copy_rows(packed.staged[name], host.staged[name], target)


def _copy_rows(sources: Sequence[Tensor], host: Tensor, target: Tensor) -> None:
    """Put the sources' rows one behind the other into `target`, through pinned `host` memory if they come from there.

    Sources that lie on the target's device are joined there; they do not cross twice.
    """
    rows = sum(len(source) for source in sources)
    if not rows:
        return
    if any(source.device.type != "cpu" for source in sources):
        _join([source.to(target.device, non_blocking=True) for source in sources], target[:rows])
        return
    _join(sources, host[:rows])
    target[:rows].copy_(host[:rows], non_blocking=True)


def _join(sources: Sequence[Tensor], target: Tensor) -> None:
    if len(sources) == 1:
        target.copy_(sources[0])
    else:
        torch.cat([source.to(target.dtype) for source in sources], out=target)
