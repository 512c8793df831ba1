"""Kimi-K2.5 and K2.6: a loop over the tower's layers, the mean over frames as a gather.

Checkpoints: `moonshotai/Kimi-{K2.5,K2.6}`. Reference: `modeling_kimi_k25.py` of transformers 5.24 (also run with 5.17,
whose own methods cannot take videos). Patches come in raster order. A clip of up to four frames is one sequence; the
learned positions are resampled (bicubic), and each frame of a clip of several adds a sinusoid. After the layers the
frames are averaged, so the tokens of a clip do not depend on its number of frames: a quarter of one frame's patches.
transformers adds frames up atomically on CUDA, in an order that may change; the sum here has one order.

The model's processor cuts a video into clips (`num_chunks_per_video` of them); with that entry a video is one item,
without it every clip is.

Capacity rule: see `PackedAdapter`. A clip of t frames has t times the patches of an image with as many tokens, so it
goes to the budget that holds its patches.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from onereplay import geometry
from onereplay.adapters.base import tile_counts
from onereplay.adapters.grids import UNUSED_GRID, GridAdapter
from onereplay.adapters.packed import PATH, PackedBatch, add_sizes
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import Item, Modality, PathSize
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid

BICUBIC_TAPS = 16


class KimiK25(GridAdapter):
    """Kimi-K2.5."""

    model_type = "kimi_k25"
    parts = ("vision_tower", "mm_projector")

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        vision = config.vision_config
        kernel, table = tuple(vision.merge_kernel_size), (vision.pos_emb_height, vision.pos_emb_width)
        if len({*kernel}) != 1 or len({*table}) != 1:
            raise UnsupportedModelError(
                f"kimi_k25 with merge_kernel_size={kernel} and a position table of {table[0]}x{table[1]} is not "
                "supported; both must be square, as published"
            )

    # sizes

    @cached_property
    def merge(self) -> int:
        """2 in every published checkpoint."""
        return int(self.config.vision_config.merge_kernel_size[0])

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @cached_property
    def max_frames(self) -> int:
        """The most frames of a clip: 4 in every published checkpoint."""
        return int(self.config.vision_config.pos_emb_time)

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """One row of `pixel_values`: a patch of one frame."""
        side = int(self.config.vision_config.patch_size)
        return (3, side, side)

    def size(self, grid: Grid) -> PathSize:
        """One sequence, with the tokens of one frame."""
        tokens = (grid.h // self.merge) * (grid.w // self.merge)
        return PathSize(tokens, grid.num_patches, sequences=1, windows=0, longest=grid.num_patches)

    def item(self, modality: Modality, grids: Sequence[Grid]) -> Item:
        """An item of these grids.

        Raises:
            InputError: a clip has more frames than the tower has positions for, or a grid has no token.
        """
        long = next((grid for grid in grids if grid.t > self.max_frames), None)
        if long is not None:
            raise InputError(
                f"a clip of grid {tuple(long)} has {long.t} frames, the tower takes up to {self.max_frames}; cut the "
                "video into clips, one grid each, as the model's processor does"
            )
        return super().item(modality, grids)

    def video_layout(self, tokens: int) -> list[Grid]:
        """A clip, and an image if need be, that fill a budget of this many tokens with their patches.

        None where transformers cannot compare: before `temporal_merge` its own methods fail on clips.
        """
        frames = min(tokens, self.max_frames - 1)
        if frames < 2 or not hasattr(Kimi_K25VisionModel, "temporal_merge"):
            return []
        clip = geometry.square_grid(tokens // frames, self.merge)._replace(t=frames)
        rest = tokens % frames
        return [clip, *([geometry.square_grid(rest, self.merge)] if rest else [])]

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in raster order, their places in the frame, the learned table and the clip; each token's patches."""
        return (
            Staged("pixels", "patches", self.pixel_shape),
            Rows("position_ids", "patches", width=2),
            Rows("interp_indices", "patches", width=BICUBIC_TAPS, dtype=torch.int32),
            Rows("interp_weights", "patches", width=BICUBIC_TAPS, dtype=torch.float32),
            Rows("frame_index", "patches", dtype=torch.int32),
            Rows("merge_gather", "tokens", width=self.max_frames * self.merge**2, shift="patches"),
            Rows("frame_weights", "tokens", width=self.max_frames, dtype=torch.float32),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """`frame_index` is 0 for an image, 1 and up for the frames of a clip.

        `merge_gather` has the patches of a token in each frame; where there are fewer frames than may be, it has those
        of the first again, with a weight of 0.
        """
        indices, weights = geometry.bicubic_taps(grid, self.config.vision_config.pos_emb_height, 1)
        frames = np.arange(grid.t, dtype=np.int32)
        gather = geometry.merge_gather(grid, self.merge).reshape(grid.t, -1, self.merge**2)
        chosen = np.arange(self.max_frames)
        chosen[grid.t :] = 0
        shares = np.where(np.arange(self.max_frames) < grid.t, np.float32(1 / grid.t), np.float32(0))
        return {
            "position_ids": geometry.raster_positions(grid),
            "interp_indices": indices,
            "interp_weights": weights,
            "frame_index": np.repeat(frames + (grid.t > 1), grid.h * grid.w),
            "merge_gather": gather[chosen].swapaxes(0, 1).reshape(gather.shape[1], -1),
            "frame_weights": np.tile(shares, (gather.shape[1], 1)),
            "cu_seqlens": geometry.clip_lengths(grid),
        }

    def items_of(self, *, num_chunks_per_video: Any = None, **sizes: Any) -> tuple[Item, ...]:
        """From `image_grid_thw`, `video_grid_thw` and `num_chunks_per_video`."""
        return _join_clips(super().items_of(**sizes), num_chunks_per_video)

    def batch(self, *, num_chunks_per_video: Any = None, **inputs: Any) -> PackedBatch:
        """From `pixel_values` `(P, 3, side, side)` and `image_grid_thw` `(N, 3)`, and the same pair for clips.

        `num_chunks_per_video` (integers) says how many clips each video has; without it every clip is an item.
        """
        found = super().batch(**inputs)
        return replace(found, items=_join_clips(found.items, num_chunks_per_video))

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """All 27."""
        return self.own.vision_tower.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Embed, run the layers, average the frames, project: `(tokens, hidden)`."""
        tower = self.own.vision_tower
        proj = tower.patch_embed.proj
        hidden = tower.patch_embed.pos_emb(
            linear(buffers.pixels.flatten(1), proj.weight.flatten(1), proj.bias),
            UNUSED_GRID,
            interp_indices=buffers.interp_indices,
            interp_weights=buffers.interp_weights,
            frame_index=buffers.frame_index,
        )
        rotation = tower.rotary_emb(hidden, buffers.position_ids)
        with use_varlen(tower.config, self.attention):
            for layer in tower.layers:
                hidden = layer(
                    hidden,
                    cu_seqlens=buffers.cu_seqlens,
                    max_seqlen=bounds["cu_seqlens"],
                    position_embeddings=rotation,
                )
        hidden = tower.final_layernorm(hidden)
        frames = hidden[buffers.merge_gather.view(-1, self.max_frames, self.merge**2)]
        pooled = (frames.float() * buffers.frame_weights[:, :, None, None]).sum(1).to(hidden.dtype)
        return (self.own.mm_projector(pooled).squeeze(1),)


def _join_clips(items: tuple[Item, ...], num_chunks_per_video: Any) -> tuple[Item, ...]:
    """One item a video from one item a clip; images stay.

    Raises:
        InputError: the counts are not positive integers or do not add up to the clips.
    """
    if num_chunks_per_video is None:
        return items
    counts = tile_counts("num_chunks_per_video", num_chunks_per_video, None)
    clips = [item for item in items if item.modality is Modality.VIDEO]
    if sum(counts) != len(clips):
        raise InputError(f"num_chunks_per_video adds up to {sum(counts)} clips, video_grid_thw has {len(clips)}")
    left = iter(clips)
    videos = [
        Item(Modality.VIDEO, {PATH: add_sizes([next(left).sizes[PATH] for _ in range(count)])}) for count in counts
    ]
    return (*(item for item in items if item.modality is Modality.IMAGE), *videos)
