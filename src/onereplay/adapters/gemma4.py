"""Gemma 4: the tower's layers over packed patches, pooled by a gather.

Checkpoints: `google/gemma-4-{E2B,E4B,26B-A4B,31B}-it`. Reference: `modeling_gemma4.py` of transformers 5.24 (also run
with 5.17). transformers pads every image to `max_soft_tokens * 9` patches (70 to 1,120 tokens) and masks; here the real
patches lie one behind the other, one sequence an image or frame, so one set of graphs serves every width, and padding
is dropped on the host. The 3x3 mean, a product with a one-hot matrix in transformers, is a gather of nine rows and a
mean in float32. Patches come in raster order, positions as (column, row).

Capacity rule: see `PackedAdapter`; an image or frame has at most 1,120 tokens, which bounds `max_seqlen`; a longer one
is an eager forward.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.base import refuse_unknown, tile_counts
from onereplay.adapters.packed import PackedAdapter, PackedBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Packed, Rows, Staged
from onereplay.core.items import Item, Modality
from onereplay.errors import InputError
from onereplay.geometry import Grid

MAX_SOFT_TOKENS = 1120
"""The most tokens of an image that the processor admits; its `max_soft_tokens` is 70, 140, 280, 560 or 1,120."""

_KINDS = (
    (Modality.IMAGE, "pixel_values", "image_position_ids", "num_soft_tokens_per_image"),
    (Modality.VIDEO, "pixel_values_videos", "video_position_ids", "num_soft_tokens_per_video"),
)
_FRAMES = "num_frames_per_video"
_SIZES = (*(name for kind in _KINDS for name in kind[2:]), _FRAMES)
_INPUTS = (*(kind[1] for kind in _KINDS), *_SIZES)


class Gemma4(PackedAdapter):
    """Gemma 4."""

    model_type = "gemma4"
    parts = ("vision_tower", "embed_vision")
    modalities = (Modality.IMAGE, Modality.VIDEO)
    entry_points: ClassVar = {
        "get_image_features": ("pixel_values", "image_position_ids"),
        "get_video_features": ("pixel_values_videos", "video_position_ids", _FRAMES),
    }

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        self.max_sequence_patches = MAX_SOFT_TOKENS * self.merge**2

    # sizes

    @cached_property
    def merge(self) -> int:
        """The side of a pooled unit: 3 in every published checkpoint."""
        return int(self.config.vision_config.pooling_kernel_size)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @cached_property
    def patch_dim(self) -> int:
        """Values of one patch row."""
        return int(3 * self.config.vision_config.patch_size**2)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in raster order; each patch's (column, row); the patches of each token."""
        return (
            Staged("pixels", "patches", (self.patch_dim,)),
            Rows("position_ids", "patches", width=2),
            Rows("pool_gather", "tokens", width=self.merge**2, shift="patches"),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The metadata of one image or frame."""
        return {
            "position_ids": np.ascontiguousarray(geometry.raster_positions(grid)[:, ::-1]),
            "pool_gather": geometry.merge_gather(grid, self.merge),
            "cu_seqlens": geometry.frame_lengths(grid),
        }

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `image_position_ids` or `num_soft_tokens_per_image`; for videos from `num_frames_per_video` with
        `video_position_ids` or `num_soft_tokens_per_video` (tokens of one frame)."""
        given = refuse_unknown(sizes, _SIZES, self.model_type)
        found: list[Item] = []
        for modality, _, positions, tokens in _KINDS:
            if positions in given:
                grids = self._grids(positions, given[positions])
                found += self._items(modality, grids, _frames(modality, given, given[positions]))
            elif tokens in given:
                counts = tile_counts(tokens, given[tokens], None)
                frames = [1] * len(counts)
                if modality is Modality.VIDEO:
                    frames = tile_counts(_FRAMES, given.get(_FRAMES), len(counts))
                strips = [Grid(1, self.merge, self.merge * count) for count in counts]
                found += [self.item(modality, [grid] * f) for grid, f in zip(strips, frames, strict=True)]
        return tuple(found)

    def batch(self, **inputs: Any) -> PackedBatch:
        """From `pixel_values` `(N, L, patch_dim)` and `image_position_ids` `(N, L, 2)`, (-1, -1) on padding.

        Videos are `pixel_values_videos` `(frames of all, L, patch_dim)`, `video_position_ids` and
        `num_frames_per_video`, or one axis more and no counts, as transformers 5.17 has it. Positions should lie on the
        CPU: reading them back waits for the device. Token counts, if given, must agree. Images come first, then videos.
        """
        given = refuse_unknown(inputs, _INPUTS, self.model_type)
        kinds = [kind for kind in _KINDS if {*kind[1:]} & given.keys()]
        return self.join([self._of_kind(given, *kind) for kind in kinds])

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Grids of one frame are images, others videos. Pixels are of 0 to 1, as the processor's, and so is padding, of
        which every row has some."""
        inputs: dict[str, Tensor] = {}
        for modality, pixels, positions, _ in _KINDS:
            chosen = [grid for grid in grids if (grid.t > 1) == (modality is Modality.VIDEO)]
            if not chosen:
                continue
            frames = [grid._replace(t=1) for grid in chosen for _ in range(grid.t)]
            width = max(grid.num_patches for grid in frames) + self.merge**2
            places = np.full((len(frames), width, 2), -1, dtype=np.int64)
            for row, grid in zip(places, frames, strict=True):
                row[: grid.num_patches] = self._piece(grid)["position_ids"]
            shape = (len(frames), width, self.patch_dim)
            inputs[pixels] = torch.rand(shape, generator=generator, device=generator.device)
            inputs[positions] = torch.from_numpy(places)
            if modality is Modality.VIDEO:
                inputs |= _as_stock_takes_videos(inputs, [grid.t for grid in chosen])
        return inputs

    def _of_kind(self, given: Mapping[str, Any], modality: Modality, *names: str) -> PackedBatch:
        pixels, positions, tokens = names
        if pixels not in given or positions not in given:
            raise InputError(f"{pixels} and {positions} come together; give both")
        grids = self._grids(positions, given[positions])
        frames = _frames(modality, given, given[positions])
        items = self._items(modality, grids, frames)
        rows, expected = given[pixels], (*given[positions].shape[:-1], self.patch_dim)
        if tuple(rows.shape) != expected:
            raise InputError(f"{pixels} has shape {tuple(rows.shape)}, {positions} asks for {expected}")
        first = [grids[start] for start in itertools.accumulate(frames[:-1], initial=0)] if frames else []
        counts = [grid.num_patches // self.merge**2 for grid in first]
        if tokens in given and tile_counts(tokens, given[tokens], None) != counts:
            raise InputError(f"{tokens}={given[tokens]!r:.80} does not fit {positions}, which asks for {counts}")
        padded = rows.flatten(0, -3)
        return PackedBatch(items, grids, tuple(r[: g.num_patches] for r, g in zip(padded, grids, strict=True)))

    def _items(self, modality: Modality, grids: Sequence[Grid], frames: Sequence[int]) -> tuple[Item, ...]:
        if sum(frames) != len(grids):
            raise InputError(f"{_FRAMES} adds up to {sum(frames)} frames, video_position_ids has {len(grids)}")
        left = iter(grids)
        return tuple(self.item(modality, list(itertools.islice(left, count))) for count in frames)

    def _grids(self, name: str, value: Any) -> tuple[Grid, ...]:
        """The grid of each image or frame, from positions that must be those of a raster, then padding."""
        if getattr(value, "ndim", 0) not in (3, 4) or value.shape[-1] != 2:
            raise InputError(f"{name} must be a table of integers (N, L, 2), got {value!r:.80}")
        table = (value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)).reshape(-1, *value.shape[-2:])
        return tuple(self._grid(f"row {row} of {name}", places) for row, places in enumerate(table))

    def _grid(self, name: str, places: Array) -> Grid:
        columns, rows = (int(side) + 1 for side in places.max(axis=0, initial=-1))
        grid, most = Grid(1, rows, columns), int(self.config.vision_config.position_embedding_size)
        if min(rows, columns) < 1 or rows % self.merge or columns % self.merge or max(rows, columns) > most:
            raise InputError(
                f"{name} has {rows}x{columns} patches; height and width must be multiples of {self.merge} patches from "
                f"{self.merge} to {most}"
            )
        count = grid.num_patches
        real, padding = places[:count], places[count:]
        if count > len(places) or (padding != -1).any() or (real != self._piece(grid)["position_ids"]).any():
            raise InputError(
                f"{name} is not the raster of {rows}x{columns} patches, (column, row) line by line, then (-1, -1) on "
                f"padding; pass it as the processor gives it"
            )
        return grid

    def pack(self, path: str, batch: PackedBatch) -> Packed:
        """The tower's `2 * (pixels - 0.5)` comes first, in the pixels' own type: in bfloat16 it would lose bits near 1.
        It takes the place of the conversion to the model's type and costs no pass more."""
        pixels = tuple(_centred(rows, self.dtype) for rows in batch.pixels)
        return dataclasses.replace(super().pack(path, batch), staged={"pixels": pixels})

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.own.vision_tower.encoder.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Embed, run the layers, pool and scale in float32 as the tower does, project: `(tokens, hidden)`."""
        tower = self.own.vision_tower
        embedder, positions = tower.patch_embedder, buffers.position_ids.unsqueeze(0)
        hidden = embedder.input_proj(buffers.pixels.unsqueeze(0))
        hidden = hidden + embedder._position_embeddings(positions, positions[..., 0] < 0)
        rotary = tower.encoder.rotary_emb(hidden, positions)
        with use_varlen(tower.config, self.attention):
            for layer in tower.encoder.layers:
                hidden = layer(
                    hidden,
                    position_embeddings=rotary,
                    position_ids=positions,
                    cu_seq_lens_q=buffers.cu_seqlens,
                    max_length_q=bounds["cu_seqlens"],
                )
        pooled = hidden.squeeze(0)[buffers.pool_gather].float().mean(1).to(hidden.dtype)
        scaled = pooled.float() * tower.pooler.root_hidden_size
        if tower.config.standardize:
            scaled = (scaled - tower.std_bias.float()) * tower.std_scale.float()
        return (self.own.embed_vision(scaled.to(hidden.dtype)),)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a tuple, one tensor an image or video."""
        return BaseModelOutputWithPooling(pooler_output=tuple(features))


def _frames(modality: Modality, given: Mapping[str, Any], positions: Any) -> list[int]:
    """How many rows of the table each item has: one an image, the frames of each video."""
    if modality is Modality.IMAGE:
        return [1] * len(positions)
    if positions.ndim == 4:
        return [positions.shape[1]] * len(positions)
    if _FRAMES not in given:
        raise InputError(f"give {_FRAMES} with video_position_ids of three axes: all videos share the first")
    return tile_counts(_FRAMES, given[_FRAMES], None)


def _centred(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """`2 * pixels - 1`, rounded to `dtype` once."""
    centred = torch.empty(pixels.shape, dtype=dtype, device=pixels.device)
    return torch.add(torch.tensor(-1.0, dtype=pixels.dtype), pixels, alpha=2, out=centred)


def _as_stock_takes_videos(inputs: Mapping[str, Tensor], frames: Sequence[int]) -> dict[str, Tensor]:
    """Frame counts beside the table of all frames; in transformers 5.17 an axis of its own for videos instead."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4Model

    if _FRAMES in inspect.signature(Gemma4Model.get_video_features).parameters:
        return {_FRAMES: torch.tensor(frames)}
    return {name: inputs[name].unflatten(0, (len(frames), frames[0])) for name in _KINDS[1][1:3]}
