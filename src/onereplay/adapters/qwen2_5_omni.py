"""Qwen2.5-Omni: the two encoders of its thinker, one path each: `vision` for images and videos, `audio` for sound.

Checkpoints: `Qwen/Qwen2.5-Omni-{3B,7B}`. Reference: `modeling_qwen2_5_omni.py` of transformers 5.24 (also run with
5.17, whose thinker has no base model: there the whole thinker is used). A whole Qwen2.5-Omni, or its checkpoint, stands
for its thinker; the parts that speak are left alone. The vision tower is Qwen2.5-VL's, see `qwen2_5_vl`.

A recording has any length, 3 frames at least. It is cut into chunks of `n_window * 2` frames (200, two seconds): two
convolutions run over each chunk by itself, the second with stride 2, and its rows attend to each other alone. Chunks
are padded for the convolutions only; the layers see the rows of sound, one behind the other. Two rows of a recording
make a token; an odd last row is read by its chunk and then dropped. So F frames give
`((F + 1) // 2) // 2` tokens, 25 a second.

Capacity rule of the audio path: a budget of T tokens has `2 T + 8` rows and `T // 25 + 8` slots for chunks (twice what
full chunks of 50 tokens need, rounded up): enough if recordings have a second of sound, or if there are few of them.
What has more odd rows or shorter recordings goes to a larger budget. That of the vision path: see `qwen2_5_vl`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.audio import frames_of
from onereplay.adapters.base import host_integers, refuse_unknown, take_rows
from onereplay.adapters.omni import OmniAdapter
from onereplay.adapters.packed import PackedAdapter, PackedBatch
from onereplay.adapters.qwen2_5_vl import Qwen25VL
from onereplay.attention.interface import use_varlen
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.plan import Capacity
from onereplay.errors import InputError
from onereplay.geometry import Grid

MODEL_TYPE = "qwen2_5_omni_thinker"
STRIDE = 2
"""Frames a row, and rows a token."""
SPARE = 8
"""Odd rows, and chunks that are less than half full, that every budget has room for; eight rows keep products
aligned."""


class OmniVision(Qwen25VL):
    """The vision tower."""

    model_type = MODEL_TYPE


class OmniAudio(PackedAdapter):
    """The audio tower. A recording of F frames is the grid `(1, 1, F)`."""

    model_type = MODEL_TYPE
    path = "audio"
    parts: ClassVar[tuple[str, ...]] = ("audio_tower",)
    modalities = (Modality.AUDIO,)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "get_audio_features": ("input_features", "feature_attention_mask", "audio_feature_lengths")
    }

    # sizes

    @property
    def merge(self) -> int:
        """Rows are merged along time alone."""
        return 1

    @cached_property
    def chunk_frames(self) -> int:
        """Frames of a full chunk: 200."""
        return 2 * int(self.config.audio_config.n_window)

    @cached_property
    def chunk_rows(self) -> int:
        """Rows of a full chunk: 100."""
        return _half(self.chunk_frames)

    @cached_property
    def bands(self) -> int:
        """Of the spectrogram."""
        return int(self.config.audio_config.num_mel_bins)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.audio_config.output_dim)

    def size(self, grid: Grid) -> PathSize:
        """One sequence a chunk."""
        rows, chunks = _half(grid.w), -(-grid.w // self.chunk_frames)
        return PathSize(rows // STRIDE, rows, chunks, longest=min(rows, self.chunk_rows))

    def _capacity(self, tokens: int, config: EncoderCudaGraphConfig) -> Capacity:
        """See the module's capacity rule."""
        rows = STRIDE * tokens
        return Capacity(
            tokens=tokens,
            patches=rows + SPARE,
            sequences=-(-2 * rows // self.chunk_rows) + SPARE,
            items=min(tokens, config.items_bound),
            longest=self.chunk_rows,
        )

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Chunks of the spectrogram, the frames of sound in each, and where its rows go."""
        return (
            Staged("pixels", "sequences", (self.bands, self.chunk_frames)),
            Rows("heard", "sequences"),
            Rows("chunk", "patches", shift="sequences"),
            Rows("place", "patches"),
            Rows("pairs", "tokens", shift="patches"),
            Offsets("cu_seqlens", of="sequences", longest_dummy=self.chunk_rows),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """Of one recording: the frames and rows of its chunks, for each row its chunk and its place there, and the
        first row of each token."""
        size = self.size(grid)
        heard = np.full(size.sequences, self.chunk_frames, dtype=np.int64)
        heard[-1] = grid.w - self.chunk_frames * (size.sequences - 1)
        chunk, place = np.divmod(np.arange(size.patches, dtype=np.int64), self.chunk_rows)
        pairs = STRIDE * np.arange(size.tokens, dtype=np.int64)
        return {"heard": heard, "chunk": chunk, "place": place, "pairs": pairs, "cu_seqlens": (heard + 1) // STRIDE}

    def recording(self, frames: int) -> Item:
        """An item of this many frames of sound."""
        if _half(frames) < STRIDE:
            raise InputError(f"a recording of {frames} frames is too short, it makes no token; give at least 3 frames")
        return self.item(Modality.AUDIO, [Grid(1, 1, frames)])

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `audio_feature_lengths`, frames of sound in each recording."""
        given = refuse_unknown(sizes, ("audio_feature_lengths",), self.model_type)
        return tuple(map(self.recording, _lengths(given.get("audio_feature_lengths", ()))))

    def batch(self, **inputs: Any) -> PackedBatch:
        """From `input_features` `(N, bands, frames)`, padded on the right, and `feature_attention_mask` `(N, frames)`.

        Without a mask `audio_feature_lengths` `(N,)` says how many frames are sound; without either all are.
        """
        given = refuse_unknown(inputs, next(iter(self.entry_points.values())), self.model_type)
        if not given:
            return self.join(())
        if "input_features" not in given:
            raise InputError(f"{' and '.join(given)} says what of input_features is sound; give them too")
        features = given["input_features"]
        shape = tuple(features.shape)
        if len(shape) != 3 or shape[1] != self.bands:
            raise InputError(
                f"input_features has shape {shape}, {self.model_type} takes (recordings, {self.bands}, frames)"
            )
        lengths = self._heard(given, *shape[::2])
        return PackedBatch(
            items=tuple(map(self.recording, lengths)),
            grids=tuple(Grid(1, 1, frames) for frames in lengths),
            pixels=tuple(map(self._chunks, features, lengths)),
        )

    def _heard(self, given: Mapping[str, Any], number: int, frames: int) -> list[int]:
        """Frames of sound in each recording."""
        if "feature_attention_mask" in given:
            return frames_of(given["feature_attention_mask"], "feature_attention_mask", (number, frames))
        lengths = _lengths(given["audio_feature_lengths"]) if "audio_feature_lengths" in given else [frames] * number
        if len(lengths) != number or max(lengths, default=0) > frames:
            raise InputError(
                f"audio_feature_lengths={lengths!r:.80} must have one entry a recording, none over its frames; "
                f"input_features has {number} recordings of {frames}"
            )
        return lengths

    def _chunks(self, features: Tensor, frames: int) -> Tensor:
        """The chunks of one recording `(chunks, bands, chunk frames)`: a view, unless its features end before the last
        chunk does."""
        chunks = -(-frames // self.chunk_frames)
        whole = features[:, : chunks * self.chunk_frames]
        missing = chunks * self.chunk_frames - whole.shape[1]
        if missing:
            whole = nn.functional.pad(whole, (0, missing))
        return whole.reshape(self.bands, chunks, self.chunk_frames).transpose(0, 1)

    def select(self, batch: PackedBatch, chosen: Sequence[int]) -> PackedBatch:
        """Recordings with their chunks."""
        chunks = [item.sizes[self.path].sequences for item in batch.items]
        return PackedBatch(
            items=tuple(batch.items[place] for place in chosen),
            grids=tuple(batch.grids[place] for place in chosen),
            pixels=take_rows(batch.pixels, chunks, chosen),
        )

    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """One recording, two, and as many as there may be of half a chunk each; some have an odd last row."""
        most = min(max_items, tokens * 2 * STRIDE // self.chunk_rows)
        counts = sorted({1, min(2, max_items, tokens), max(most, 1)})
        return [
            (f"{count} recordings" if count > 1 else "a recording", self._examples(tokens, count)) for count in counts
        ]

    def _examples(self, tokens: int, count: int) -> list[Grid]:
        """Recordings of so many tokens together, the first of all four lengths that give the same tokens."""
        parts = geometry.unequal_parts(tokens, count)
        more = [(1, 0, -1, 2)[place % 4] if place < SPARE else 0 for place in range(count)]
        return [Grid(1, 1, STRIDE**2 * part + frames) for part, frames in zip(parts, more, strict=True)]

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """A recording for each grid, padded to the longest."""
        lengths = torch.tensor([grid.w for grid in grids])
        longest = int(lengths.max())
        shape = (len(grids), self.bands, longest)
        return {
            "input_features": torch.randn(shape, generator=generator, device=generator.device),
            "feature_attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        }

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the encoder."""
        return self.own.audio_tower.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's own forward, given all that it would compute from lengths: `(tokens, hidden)`.

        What lies behind the sound in a chunk is taken out before the first convolution, whatever it is; rows that no
        sequence has read the first row of the first chunk.
        """
        tower = self.own.audio_tower
        heard = torch.arange(self.chunk_frames, device=buffers.heard.device) < buffers.heard.unsqueeze(1)
        with use_varlen(tower.config, self.attention):
            output = tower(
                padded_feature=torch.where(heard.unsqueeze(1), buffers.pixels, 0),
                chunk_lengths=buffers.heard,
                valid_indices=buffers.chunk * self.chunk_rows + buffers.place,
                pool_indices=buffers.pairs,
                cu_seqlens=buffers.cu_seqlens,
                max_seqlen=bounds["cu_seqlens"],
                output_hidden_states=False,
                output_attentions=False,
                return_dict=True,
            )
        return (output.last_hidden_state,)

    # results

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """The rows of all recordings, one behind the other."""
        rows = torch.cat(list(features))
        return BaseModelOutputWithPooling(last_hidden_state=rows, pooler_output=rows)

    def stock_rows(self, output: Any) -> list[Tensor]:
        """The last hidden state; 5.17 gives nothing else."""
        return [output.last_hidden_state]


class Qwen25Omni(OmniAdapter):
    """Qwen2.5-Omni's thinker."""

    model_type = MODEL_TYPE
    parts: ClassVar[tuple[str, ...]] = ("visual", "audio_tower")
    modalities = (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {**OmniVision.entry_points, **OmniAudio.entry_points}
    kinds = (OmniVision, OmniAudio)

    def path_of(self, grid: Grid) -> str:
        """Recordings are one row high; pictures are merged, so they are not."""
        return OmniAudio.path if grid.h == 1 else OmniVision.path


def _half(frames: int) -> int:
    """Rows of this many frames behind the second convolution."""
    return -(-frames // STRIDE)


def _lengths(value: Any) -> list[int]:
    return host_integers("audio_feature_lengths", value, 1)
