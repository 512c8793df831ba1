"""Declared buffers: what a path's `forward` reads, where it lies, and how one batch fills it.

All metadata of a path lies in one block of bytes, so one copy carries it to the device. A `Layout` says where each
buffer lies for one capacity; the graphs of a path share the block, each through its own layout, and a smaller layout
uses a shorter prefix. Pixels (and any other `STAGED` rows) have one tensor each, of which a graph uses a prefix.

The same layout serves the pinned block on the host, the static block on the device and the exact-size block of an eager
forward. A name that is missing or unknown is an error in every place, never stale data.
"""

import enum
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onereplay.core.budgets import round_up
from onereplay.core.items import PathSize
from onereplay.core.plan import Capacity
from onereplay.errors import CapacityError

Array = npt.NDArray[np.number[Any]]
"""Metadata on the host: integers, or float32 where a buffer declares it (weights of interpolation)."""
Unit = Literal["tokens", "patches", "sequences", "windows"]
"""What a buffer has one row of; a field of `Capacity`."""

MAX_DUMMY_PATCHES = 1024
"""The longest dummy sequence. Attention is quadratic in a sequence, so padding is cut into pieces."""

_ALIGNMENT = 256


class Tail(enum.Enum):
    """What the rows of a metadata buffer behind the last real row hold."""

    ZERO = enum.auto()
    IDENTITY = enum.auto()
    """Row i holds i: a permutation stays one."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Metadata, one row a patch, token, sequence or window."""

    name: str
    unit: Unit
    width: int | None = None
    """Columns; `None` for a vector."""
    dtype: torch.dtype = torch.int64
    shift: Unit | None = None
    """Add the rows of this unit that earlier items take up: for entries that index rows of the whole batch."""
    tail: Tail = Tail.ZERO


@dataclass(frozen=True, slots=True)
class Offsets:
    """Cumulative sequence lengths: int32 `(slots + 1,)`, from 0 to the path's patches.

    In a captured shape the real sequences come first, then dummy sequences of at most `longest_dummy` patches that
    cover the padding rows, then empty slots that repeat the last offset: every row belongs to a sequence.
    """

    name: str
    of: Literal["sequences", "windows"]
    longest_dummy: int = MAX_DUMMY_PATCHES

    def slots(self, capacity: Capacity) -> int:
        """Sequences that a captured shape has room for: the real ones and enough dummies for all rows."""
        real: int = getattr(capacity, self.of)
        return real + -(-capacity.patches // self.longest_dummy)


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that the caller brings in bulk (pixels), in the model's dtype. Padding rows keep what they held: they belong
    to dummy sequences or dummy tiles, and no real row reads them."""

    name: str
    unit: Unit
    shape: tuple[int, ...]


Declaration = Rows | Offsets | Staged


@dataclass(frozen=True, slots=True)
class Output:
    """A result of `forward`: `(rows of the unit, *shape)`, in the model's dtype unless it has its own."""

    name: str
    unit: Unit
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """One batch of one path on the host.

    `sizes` and `pieces` have one entry an item, in batch order. A piece holds for each `Rows` the item's rows, and for
    each `Offsets` the lengths of its sequences in patches. `staged` has, for each `Staged`, the tensors whose rows
    follow one another, on any device.
    """

    sizes: Sequence[PathSize]
    pieces: Sequence[Mapping[str, Array]]
    staged: Mapping[str, Sequence[Tensor]]
    key: Hashable = None
    """All that sizes and pieces depend on, where a batch like this is likely to come again: its metadata is then kept
    as it lies in a block. None keeps nothing."""

    def check_staged(self, declarations: Sequence[Declaration]) -> None:
        """Assert that the staged tensors bring exactly the rows that the sizes announce.

        Raises:
            CapacityError: too many rows would be cut off, too few would leave an earlier batch's rows in their place.
        """
        for part in declarations:
            if isinstance(part, Staged):
                shapes = [source.shape for source in self.staged[part.name]]
                if any(shape[1:] != part.shape for shape in shapes):
                    found = sorted({tuple(shape[1:]) for shape in shapes})
                    raise CapacityError(f"{part.name!r} brings rows of {found}, {part.shape} is declared")
                rows = sum([shape[0] for shape in shapes])
                announced = sum([getattr(size, part.unit) for size in self.sizes])
                if rows != announced:
                    raise CapacityError(f"{part.name!r} brings {rows} rows, the items announce {announced} {part.unit}")

    def as_they_come(self, declarations: Sequence[Declaration]) -> tuple[Declaration, ...]:
        """The declarations for an eager forward, which takes staged rows of any trailing shape."""
        return tuple(
            replace(part, shape=tuple(self.staged[part.name][0].shape[1:]))
            if isinstance(part, Staged) and self.staged[part.name]
            else part
            for part in declarations
        )

    @classmethod
    def empty(cls, declarations: Sequence[Declaration]) -> "Packed":
        """A batch of nothing: every row of a captured shape then belongs to a dummy sequence."""
        return cls((), (), {part.name: () for part in declarations if isinstance(part, Staged)})


class Buffers(Mapping[str, Tensor]):
    """The tensors that `forward` reads, by declared name: `buffers.pixels` or `buffers["pixels"]`."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise AttributeError(f"no buffer {name!r} is declared; declared are {', '.join(self._tensors)}") from None

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, slots=True)
class _Slot:
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where each metadata buffer of a path lies in its block, for one capacity.

    Args:
        declarations: the path's buffers.
        capacity: the captured capacity, or the exact demand of a batch that runs eagerly.
        padded: room for dummy sequences; False for an exact-size layout, which has nothing to cover.
    """

    declarations: tuple[Declaration, ...]
    capacity: Capacity
    padded: bool
    slots: Mapping[str, _Slot] = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        slots: dict[str, _Slot] = {}
        offset = 0
        for declaration in self.declarations:
            if isinstance(declaration, Staged):
                continue
            slot = _Slot(offset, self._shape(declaration), _dtype(declaration))
            slots[declaration.name] = slot
            offset = round_up(offset + slot.num_bytes, _ALIGNMENT)
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "num_bytes", offset)

    def _shape(self, declaration: Rows | Offsets) -> tuple[int, ...]:
        if isinstance(declaration, Offsets):
            real: int = getattr(self.capacity, declaration.of)
            return ((declaration.slots(self.capacity) if self.padded else real) + 1,)
        rows: int = getattr(self.capacity, declaration.unit)
        return (rows,) if declaration.width is None else (rows, declaration.width)

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """The metadata buffers as views of a block of bytes: uint8 `(at least num_bytes,)`."""
        return {
            name: block[slot.offset : slot.offset + slot.num_bytes].view(slot.dtype).view(slot.shape)
            for name, slot in self.slots.items()
        }

    def buffers(self, block: Tensor, staged: Mapping[str, Tensor]) -> Buffers:
        """What `forward` reads for this capacity: metadata views, and a prefix of each staged tensor."""
        return Buffers({**self.views(block), **self.staged_prefixes(staged)})

    def staged_prefixes(self, staged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first rows of each staged tensor, as many as the capacity has."""
        return {
            declaration.name: staged[declaration.name][: getattr(self.capacity, declaration.unit)]
            for declaration in self.declarations
            if isinstance(declaration, Staged)
        }

    @functools.cached_property
    def _bounds(self) -> dict[str, int]:
        found = {}
        for declaration in self.declarations:
            if isinstance(declaration, Offsets):
                longest = self.capacity.longest if declaration.of == "sequences" else declaration.longest_dummy
                dummy = min(declaration.longest_dummy, self.capacity.patches) if self.padded else 0
                found[declaration.name] = max(longest, dummy, 1)
        return found

    def bounds(self) -> dict[str, int]:
        """For each `Offsets`, a host integer that no sequence exceeds: `max_seqlen`.

        Real sequences are at most `capacity.longest` patches (windows: `longest_dummy`, which is the window's size).
        """
        return dict(self._bounds)

    def fill(self, views: Mapping[str, Array], packed: Packed) -> None:
        """Write one batch's metadata into numpy views of a host block, padding included.

        Raises:
            CapacityError: the batch has more rows or sequences than the layout; a bug in an adapter's sizes.
            KeyError: a piece misses a declared name or has one that is not declared.
        """
        declared = set(self.slots)
        for piece in packed.pieces:
            if piece.keys() != declared:
                raise KeyError(f"packed {sorted(piece)}, but the path declares {sorted(declared)}")
        for declaration in self.declarations:
            match declaration:
                case Rows():
                    self._fill_rows(declaration, views[declaration.name], packed)
                case Offsets():
                    self._fill_offsets(declaration, views[declaration.name], packed)

    def _fill_rows(self, rows: Rows, view: Array, packed: Packed) -> None:
        arrays = [piece[rows.name] for piece in packed.pieces]
        counts = [len(array) for array in arrays]
        if counts != [getattr(size, rows.unit) for size in packed.sizes]:
            raise CapacityError(f"{rows.name!r} has {counts} rows, the items announce other numbers of {rows.unit}")
        total = sum(counts)
        self._check(rows.name, total, len(view))
        if arrays:
            np.concatenate(arrays, out=view[:total], casting="same_kind")
        if rows.shift is not None and len(arrays) > 1:
            taken = [getattr(size, rows.shift) for size in packed.sizes]
            shifts = np.repeat(np.cumsum([0, *taken[:-1]]), counts)
            view[:total] += shifts if view.ndim == 1 else shifts[:, None]
        if total < len(view):
            tail = np.arange(total, len(view)) if rows.tail is Tail.IDENTITY else 0
            view[total:] = tail if view.ndim == 1 or rows.tail is Tail.ZERO else tail[:, None]  # type: ignore[index]

    def _fill_offsets(self, offsets: Offsets, view: Array, packed: Packed) -> None:
        lengths = np.concatenate([piece[offsets.name] for piece in packed.pieces] or [np.zeros(0, np.int64)])
        covered = int(lengths.sum())
        self._check(offsets.name, covered, self.capacity.patches)
        if covered != sum(size.patches for size in packed.sizes):
            raise CapacityError(f"{offsets.name!r} covers {covered} patches, the items announce another number")
        self._check(f"{offsets.name} (the longest sequence)", int(lengths.max(initial=0)), self._bounds[offsets.name])
        if self.padded:
            lengths = np.concatenate([lengths, _dummies(self.capacity.patches - covered, offsets.longest_dummy)])
        self._check(offsets.name, len(lengths), len(view) - 1)
        view[0] = 0
        np.cumsum(lengths, out=view[1 : len(lengths) + 1])
        view[len(lengths) + 1 :] = view[len(lengths)]

    def _check(self, name: str, asked: int, room: int) -> None:
        if asked > room:
            raise CapacityError(f"buffer {name!r} has room for {room}, the batch needs {asked} ({self.capacity})")


def _dummies(rows: int, longest: int) -> Array:
    """Lengths of the dummy sequences that cover `rows` padding rows."""
    full, rest = divmod(rows, longest)
    return np.asarray([longest] * full + [rest] * (rest > 0), dtype=np.int64)


def _dtype(declaration: Rows | Offsets) -> torch.dtype:
    return torch.int32 if isinstance(declaration, Offsets) else declaration.dtype
