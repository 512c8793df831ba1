"""The packed engine: rows of patches of the whole batch one behind the other, told apart by cumulative lengths.

What a model adds: its buffers, the metadata of one grid (`piece`), and `forward`. Captured rows come from the budget
alone: `tokens * merge**2`.
"""

import functools
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from onereplay import geometry
from onereplay.adapters.base import Adapter, take_rows
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.assembly import split_rows
from onereplay.core.buffers import Array, Declaration, Output, Packed
from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.plan import Capacity
from onereplay.core.protocol import PathSpec
from onereplay.errors import InputError
from onereplay.geometry import Grid

PATH = "vision"
PIECES_MIB = 128
"""Metadata that is kept for grids that come again. A 16,384-token image takes 1.2 MiB (Qwen2.5-VL), or 9 MiB with the
sixteen taps of GLM-4.1V; small images take kilobytes."""
SIZES_KEPT = 4096


@dataclass(frozen=True)
class PackedBatch:
    """Items of a packed model. An item has one grid (an image, a video) or several (tiles)."""

    items: tuple[Item, ...]
    grids: tuple[Grid, ...]
    """Of all items, in order."""
    pixels: tuple[Tensor, ...]
    """Tensors `(rows, patch_dim)` whose rows follow one another, in the order of the grids."""


class PackedAdapter(Adapter[PackedBatch]):
    """What all packed models share.

    Capacity rule: a budget of T tokens has `T * merge**2` patch rows and `min(T, slots)` real sequences, since every
    sequence has at least one token; `slots` is the larger of `max_items_per_batch` and `max_frames_per_batch`.
    """

    engine = "packed"
    path: ClassVar[str] = PATH
    max_sequence_patches: int | None = None
    """The longest sequence that the processor makes, if it has a bound; else a sequence may fill the budget."""

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        self._piece = _Kept(self.piece, PIECES_MIB * 2**20)
        self._size: Callable[[Grid], PathSize] = functools.lru_cache(SIZES_KEPT)(self.size)
        self._item: Mapping[Modality, Callable[[Grid], Item]] = {
            modality: functools.lru_cache(SIZES_KEPT)(functools.partial(self._single, modality))
            for modality in Modality
        }
        """Items of one grid."""

    @property
    @abstractmethod
    def merge(self) -> int:
        """The side of a merged unit, in patches."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """The width of a token."""

    @abstractmethod
    def buffers(self) -> tuple[Declaration, ...]:
        """What `forward` reads."""

    @abstractmethod
    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The metadata of one grid, without offsets; kept for grids that come again."""

    def size(self, grid: Grid) -> PathSize:
        """What one grid asks: one sequence a frame."""
        t, h, w = grid
        tokens = t * (h // self.merge) * (w // self.merge)
        return PathSize(tokens, grid.num_patches, sequences=t, windows=0, longest=h * w)

    def windows_capacity(self, tokens: int, sequences: int) -> int:
        """Slots for real windows in a budget; 0 for a tower without windows."""
        return 0

    # The core's side

    def paths(self) -> Mapping[str, PathSpec]:
        """One path."""
        return {self.path: PathSpec(self.buffers(), (Output("features", "tokens", (self.hidden_size,)),))}

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """One capacity a budget."""
        return [self._capacity(tokens, config) for tokens in config.ladder(self.max_batch_tokens)]

    def _capacity(self, tokens: int, config: EncoderCudaGraphConfig) -> Capacity:
        patches = tokens * self.merge**2
        sequences = min(tokens, config.sequence_slots)
        return Capacity(
            tokens=tokens,
            patches=patches,
            sequences=sequences,
            items=min(tokens, config.items_bound),
            windows=self.windows_capacity(tokens, sequences),
            longest=min(patches, self.max_sequence_patches or patches),
        )

    def pack(self, path: str, batch: PackedBatch) -> Packed:
        """Metadata of each grid, and the pixels as they came."""
        grids = batch.grids
        return Packed(
            sizes=list(map(self._size, grids)),
            pieces=self._piece.all_of(grids),
            staged={"pixels": batch.pixels},
            key=(grids[0], len(grids)) if len(set(grids)) == 1 else None,  # other mixes hardly come again
        )

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: PackedBatch) -> list[Tensor]:
        """Each item's rows."""
        return split_rows(rows[self.path][0], [item.sizes[self.path].tokens for item in batch.items])

    def join(self, batches: Sequence[PackedBatch]) -> PackedBatch:
        """Items, grids and pixels one behind the other."""
        if len(batches) == 1:
            return batches[0]
        return PackedBatch(
            items=tuple(item for batch in batches for item in batch.items),
            grids=tuple(grid for batch in batches for grid in batch.grids),
            pixels=tuple(pixels for batch in batches for pixels in batch.pixels),
        )

    def select(self, batch: PackedBatch, chosen: Sequence[int]) -> PackedBatch:
        """Items with their grids and rows of pixels."""
        grids_of = self._grids_of(batch)
        rows = [item.sizes[self.path].patches for item in batch.items]
        return PackedBatch(
            items=tuple(batch.items[place] for place in chosen),
            grids=tuple(grid for place in chosen for grid in grids_of[place]),
            pixels=take_rows(batch.pixels, rows, chosen),
        )

    def _grids_of(self, batch: PackedBatch) -> list[list[Grid]]:
        """The grids of each item: as many as make up its patches."""
        left = iter(batch.grids)
        found = []
        for item in batch.items:
            grids: list[Grid] = []
            while sum(self._size(grid).patches for grid in grids) < item.sizes[self.path].patches:
                grids.append(next(left))
            found.append(grids)
        return found

    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """The fewest images, twice as many, as many as there may be, and a video where the model takes videos."""
        piece = self._longest_piece(tokens)
        fewest, many = -(-tokens // piece), min(tokens, max_items)
        while geometry.unequal_parts(tokens, fewest)[0] > piece:
            fewest += 1
        counts = {"the fewest images": fewest}
        if tokens >= 2:
            counts["two images" if fewest == 1 else "more images"] = 2 * fewest
        if many > 2 and geometry.unequal_parts(tokens, many)[0] <= piece:
            counts[f"{many} images"] = many
        found = [
            (name, [geometry.square_grid(part, self.merge) for part in geometry.unequal_parts(tokens, count)])
            for name, count in counts.items()
            if count <= max_items
        ]
        video = self.video_layout(tokens) if Modality.VIDEO in self.modalities and tokens >= 4 else []
        return [*found, (f"a video of {video[0].t} frames", video)] if video else found

    def video_layout(self, tokens: int) -> list[Grid]:
        """A video, and an image if need be, of exactly this many tokens together (at least 4)."""
        frames = max(-(-tokens // self._longest_piece(tokens)), *(t for t in range(2, 9) if t <= tokens))
        clip = geometry.square_grid(tokens // frames, self.merge)._replace(t=frames)
        rest = tokens % frames
        return [clip, *([geometry.square_grid(rest, self.merge)] if rest else [])]

    def _longest_piece(self, tokens: int) -> int:
        """Tokens of the longest sequence that the processor makes, or all of them."""
        return tokens if self.max_sequence_patches is None else self.max_sequence_patches // self.merge**2

    # The adapters' side

    def item(self, modality: Modality, grids: Sequence[Grid]) -> Item:
        """An item of these grids.

        Raises:
            InputError: a grid has no token.
        """
        sizes = [self._size(grid) for grid in grids]
        empty = next((grid for grid, size in zip(grids, sizes, strict=True) if min(grid) < 1 or size.tokens < 1), None)
        if empty is not None or not grids:
            raise InputError(
                f"an item of grid {tuple(empty) if empty else ()} has no token; height and width must be at least "
                f"{self.merge} patches and a video needs a frame"
            )
        return Item(modality, {self.path: add_sizes(sizes)})

    def _single(self, modality: Modality, grid: Grid) -> Item:
        return self.item(modality, [grid])


class _Kept:
    """The pieces of the grids that came last, within a number of bytes. Thread-safe."""

    def __init__(self, make: Callable[[Grid], Mapping[str, Array]], max_bytes: int) -> None:
        self._make, self._left = make, max_bytes
        self._pieces: OrderedDict[Grid, Mapping[str, Array]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, grid: Grid) -> Mapping[str, Array]:
        """The piece of a grid, made if it is not kept."""
        with self._lock:
            return self._one(grid)

    def all_of(self, grids: Sequence[Grid]) -> list[Mapping[str, Array]]:
        """The pieces of many grids."""
        with self._lock:
            return list(map(self._one, grids))

    def _one(self, grid: Grid) -> Mapping[str, Array]:
        if (kept := self._pieces.get(grid)) is not None:
            self._pieces.move_to_end(grid)
            return kept
        piece = self._pieces[grid] = self._make(grid)
        self._left -= _bytes(piece)
        while self._left < 0 and len(self._pieces) > 1:
            self._left += _bytes(self._pieces.popitem(last=False)[1])
        return piece


def _bytes(piece: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in piece.values())


def add_sizes(sizes: Sequence[PathSize]) -> PathSize:
    """What several grids of one item ask together."""
    return PathSize(
        tokens=sum(size.tokens for size in sizes),
        patches=sum(size.patches for size in sizes),
        sequences=sum(size.sequences for size in sizes),
        windows=sum(size.windows for size in sizes),
        longest=max(size.longest for size in sizes),
    )
