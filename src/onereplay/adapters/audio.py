"""Encoders of sound: windows of a spectrogram `[N, bands, frames]` in, on the engine of tiles.

Recordings come as what the model's feature extractor makes of them; files of audio are not read here. A window attends
to itself alone. Where the encoder hears how long the sound in a window is (`HeardAdapter`), that number is metadata of
the window: keys behind it are masked, and rows behind it are left out of the results.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from onereplay.adapters.base import take_rows
from onereplay.adapters.tiles import TileAdapter, TileBatch
from onereplay.core.buffers import Declaration, Packed, Rows
from onereplay.core.items import Item, Modality, PathSize
from onereplay.errors import InputError
from onereplay.geometry import Grid


class AudioAdapter(TileAdapter):
    """What encoders of sound share."""

    modalities = (Modality.AUDIO,)
    path = "audio"
    input_name = "input_features"
    size_names: ClassVar[tuple[str, ...]] = ("num_windows",)

    @property
    def audio(self) -> Any:
        """The encoder's configuration."""
        return getattr(self.config, "audio_config", self.config)

    def image_counts(self, given: Mapping[str, Any]) -> Any:
        """The windows of each recording."""
        return given.get("num_windows")

    def tokens_of(self, height: int, width: int) -> int:
        """Rows of one window of `height` bands and `width` frames; every window has the same."""
        if (height, width) != self.tile_shape:
            bands, frames = self.tile_shape
            raise InputError(
                f"a window of {height} bands and {width} frames; {self.model_type} takes {bands} bands and {frames} "
                f"frames: pad shorter sound, as its feature extractor does, and cut longer sound"
            )
        return self.window_tokens

    @property
    @abstractmethod
    def window_tokens(self) -> int:
        """Rows of results of one window."""


@dataclass(frozen=True)
class HeardBatch(TileBatch):
    """Recordings whose windows are not full."""

    heard: tuple[tuple[int, ...], ...] = ()
    """For each item, frames with sound in each of its windows."""


class HeardAdapter(AudioAdapter):
    """An encoder that hears how much of a window is sound.

    Capacity is counted in whole windows; an item's result has the rows of its sound alone (`Item.num_rows`).
    """

    @abstractmethod
    def rows_heard(self, frames: int) -> int:
        """Rows of results for this many frames of sound in a window."""

    def buffers(self) -> tuple[Declaration, ...]:
        """The windows, and the frames of sound in each."""
        return (*super().buffers(), Rows("heard", "sequences"))

    def recording(self, heard: Sequence[int]) -> Item:
        """An item of windows with so much sound."""
        bands, frames = self.tile_shape[0], self.tile_shape[1]
        rows = sum(self.rows_heard(count) for count in heard)
        if not rows:
            raise InputError(
                f"a recording of {sum(heard)} frames is too short, {self.model_type} makes no row of it; give at least "
                f"{next(count for count in range(1, frames) if self.rows_heard(count))} frames"
            )
        number, patches = len(heard), self.patches_of(bands, frames)
        size = PathSize(number * self.window_tokens, number * patches, number, longest=patches)
        return Item(Modality.AUDIO, {self.path: size}, rows=rows)

    def pack(self, path: str, batch: TileBatch) -> Packed:
        """The windows and what is heard in them."""
        assert isinstance(batch, HeardBatch)
        pieces = [{"heard": np.asarray(heard, dtype=np.int64)} for heard in batch.heard]
        return Packed([item.sizes[path] for item in batch.items], pieces, {"pixels": batch.tiles})

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: TileBatch) -> list[Tensor]:
        """Each recording's rows of sound `(rows, hidden)`."""
        assert isinstance(batch, HeardBatch)
        left = iter(rows[self.path][0].split(self.window_tokens))
        found = []
        for heard in batch.heard:
            parts = [next(left)[: self.rows_heard(count)] for count in heard]
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts))
        return found

    def select(self, batch: TileBatch, chosen: Sequence[int]) -> TileBatch:
        """Recordings with their windows."""
        assert isinstance(batch, HeardBatch)
        windows = take_rows(batch.tiles, [len(heard) for heard in batch.heard], chosen)
        return HeardBatch(
            tuple(batch.items[place] for place in chosen), windows, tuple(batch.heard[place] for place in chosen)
        )

    def join(self, batches: Sequence[TileBatch]) -> TileBatch:
        """Recordings one behind the other."""
        joined = super().join(batches)
        heard = tuple(each for batch in batches if isinstance(batch, HeardBatch) for each in batch.heard)
        return HeardBatch(joined.items, joined.tiles, heard)

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """One recording of one window for each grid, of every length in turn: full, half, and a few frames."""
        bands, frames = self.tile_shape[0], self.tile_shape[1]
        lengths = torch.tensor([(frames, frames // 2 + 1, frames - 3)[place % 3] for place in range(len(grids))])
        shape = (len(grids), bands, frames)
        return {
            "input_features": torch.randn(shape, generator=generator, device=generator.device),
            "feature_attention_mask": (torch.arange(frames) < lengths[:, None]).long(),
        }


def frames_of(mask: Any, name: str, shape: tuple[int, ...]) -> list[int]:
    """Frames of sound in each row of a mask `(N, frames)` of ones, then zeros.

    A mask on the device is read back, which waits for the device: keep it on the CPU.

    Raises:
        InputError: it has another shape, or its ones are not in front.
    """
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"{name} is {found}, input_features ask for {shape}")
    host = mask.cpu().bool()
    lengths: list[int] = host.sum(-1).tolist()
    if not torch.equal(host, torch.arange(shape[-1]) < torch.tensor(lengths).reshape(-1, 1)):
        raise InputError(f"{name} must be ones for the frames of sound, then zeros: padding lies on the right")
    return lengths
