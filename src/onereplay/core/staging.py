"""How one batch reaches the device: one asynchronous copy of metadata and one of each staged tensor (pixels).

The host writes into pinned blocks that take turns; an event guards each, so a block is never overwritten while a copy
still reads it. Metadata that comes again (`Packed.key`) is a look-up and a copy into such a block. Pixels that the
caller wrote into the static block itself (`Block.lent`) are not copied. Nothing here reads the device.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from onereplay.core.buffers import Array, Buffers, Layout, Packed, Staged
from onereplay.errors import InputError

TURNS = 3
"""Host blocks that take turns: the host may pack two batches ahead of the copies."""
KEPT_MIB = 64
"""Metadata of whole batches that is kept for a path; of one 1,024-token image 85 KiB (Qwen2.5-VL)."""


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
        self.lent: set[str] = set()
        """Staged tensors that a caller may write into now, and that hold what it wrote."""
        self._prefixes: dict[int, Tensor] = {}

    def prefix(self, num_bytes: int) -> Tensor:
        """The first bytes of the metadata."""
        found = self._prefixes.get(num_bytes)
        if found is None:
            with torch.inference_mode(False):
                found = self._prefixes[num_bytes] = self.metadata[:num_bytes]
        return found

    def holds(self, name: str, sources: Sequence[Tensor]) -> bool:
        """True if the sources are the first rows of this block's own tensor: the caller wrote in place.

        Raises:
            InputError: they lie in it, but are not lent any more, or not in order.
        """
        target = self.staged[name]
        start = target.data_ptr()
        end = start + target.nbytes
        if not any(0 < start <= source.data_ptr() < end for source in sources):  # 0: a tensor without memory
            return False
        if name not in self.lent:
            raise InputError(
                f"{name!r} lies in the encoder's own buffer, where another batch may have been since; write and encode "
                f"within one `with staging_area(...)`, before any other batch, or give a tensor of your own"
            )
        for source in sources:
            if source.data_ptr() != start or source.dtype != target.dtype or not source.is_contiguous():
                raise InputError(
                    f"{name!r} lies in the encoder's own buffer, but not as whole rows from its start, in order and "
                    f"without gaps; write them so, or give a tensor of your own"
                )
            start += source.nbytes
        return True

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
        self._views: dict[int, tuple[Array, dict[str, Array]]] = {}

    def views(self, layout: Layout) -> tuple[Array, Mapping[str, Array]]:
        """All bytes of a layout, and its buffers."""
        if id(layout) not in self._views:
            views = layout.views(self.block.metadata)
            whole = self.block.prefix(layout.num_bytes).numpy()
            self._views[id(layout)] = whole, {name: view.numpy() for name, view in views.items()}
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
        self._kept: OrderedDict[Hashable, Array] = OrderedDict()
        self._kept_bytes = 0

    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory; 0 where nothing is pinned."""
        return sum(turn.block.num_bytes for turn in self._turns if turn.copied is not None)

    def load(self, packed: Packed, layout: Layout, into: Block, stream: torch.cuda.Stream | None = None) -> None:
        """Copy one batch into the static block: one copy of metadata, and one of each `Staged` that does not lie there.

        Args:
            packed: the batch.
            layout: of the capacity that it goes to.
            into: the static block.
            stream: the current stream, if the caller knows it: asking for it takes longer than to use it.
        """
        packed.check_staged(layout.declarations)
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        if turn.copied is not None:
            turn.copied.synchronize()
        if layout.num_bytes:
            self._fill(packed, layout, turn)
            into.prefix(layout.num_bytes).copy_(turn.block.prefix(layout.num_bytes), non_blocking=True)
        for name, target in into.staged.items():
            sources = packed.staged[name]
            if sources and not into.holds(name, sources):
                into.lent.discard(name)
                _copy_rows(sources, turn.block.staged[name], target)
        if turn.copied is not None:
            turn.copied.record(stream)

    def _fill(self, packed: Packed, layout: Layout, turn: _HostTurn) -> None:
        """Write the metadata into the host block: as it was kept from a batch of the same key, or piece by piece."""
        whole, views = turn.views(layout)
        key = (id(layout), packed.key)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            np.copyto(whole, kept)
            return
        layout.fill(views, packed)
        if packed.key is not None:
            self._kept[key] = whole.copy()
            self._kept_bytes += whole.nbytes
            while self._kept_bytes > KEPT_MIB * 2**20:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes


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


def _copy_rows(sources: Sequence[Tensor], host: Tensor, target: Tensor) -> None:
    """Put the sources' rows one behind the other into `target`, through pinned `host` memory if they come from there.

    Sources that lie on the target's device are joined there; they do not cross twice.
    """
    rows = sum([source.shape[0] for source in sources])
    if not rows:
        return
    if all(source.is_cpu for source in sources):
        _join(sources, host[:rows])
        target[:rows].copy_(host[:rows], non_blocking=True)
    elif len(sources) == 1:
        target[:rows].copy_(sources[0], non_blocking=True)
    else:
        _join([source.to(target.device, non_blocking=True) for source in sources], target[:rows])


def _join(sources: Sequence[Tensor], target: Tensor) -> None:
    if len(sources) == 1:
        target.copy_(sources[0])
    else:
        torch.cat([source.to(target.dtype) for source in sources], out=target)
