"""ERNIE-4.5-VL: the tower's own forward, and the resampler with its frame pairs as a gather.

Checkpoints: `baidu/ERNIE-4.5-VL-{28B-A3B,424B-A47B}-PT`. Reference: `modeling_ernie4_5_vl_moe.py` of transformers 5.24
(also run with 5.17). The tower sees one sequence a frame. The resampler merges 2x2 patches, then the same place of two
frames of a video; an image is merged with itself. So a video has an even number of frames and half the tokens of as
many images: transformers loses the last frame of an odd number and then fails to split what is left, and the model's
processor repeats the last frame. Other numbers are refused here.

Capacity rule: see `PackedAdapter`. A video has twice the patches of images with as many tokens, so it goes to the
budget that holds its patches: one of twice its tokens.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from onereplay import geometry
from onereplay.adapters.grids import GridAdapter
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import Item, Modality, PathSize
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid

FRAMES_A_TOKEN = 2
"""Fixed in the resampler's code."""


class Ernie45VL(GridAdapter):
    """ERNIE-4.5-VL."""

    model_type = "ernie4_5_vl_moe"
    parts = ("vision_tower", "resampler_model")

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if config.vision_config.temporal_merge_size != FRAMES_A_TOKEN:
            raise UnsupportedModelError(
                f"{self.model_type} with temporal_merge_size={config.vision_config.temporal_merge_size} is not "
                f"supported; transformers merges {FRAMES_A_TOKEN} frames, as published"
            )

    # sizes

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """One row of `pixel_values`: the values of a patch of one frame."""
        vision = self.config.vision_config
        return (int(vision.in_channels * vision.patch_size**2),)

    def size(self, grid: Grid) -> PathSize:
        """One sequence a frame; half the tokens for a video."""
        size = super().size(grid)
        tokens = size.tokens if grid.t == 1 else size.tokens // FRAMES_A_TOKEN
        return PathSize(tokens, size.patches, size.sequences, size.windows, size.longest)

    def item(self, modality: Modality, grids: Sequence[Grid]) -> Item:
        """An item of these grids.

        Raises:
            InputError: a number of frames that the resampler cannot merge, or a grid without a token.
        """
        for grid in grids:
            if modality is Modality.IMAGE and grid.t > 1:
                raise InputError(
                    f"an image of grid {tuple(grid)} has {grid.t} frames; give it as pixel_values_videos and "
                    "video_grid_thw"
                )
            if modality is Modality.VIDEO and grid.t % FRAMES_A_TOKEN:
                raise InputError(
                    f"a video of grid {tuple(grid)} has {grid.t} frames; it must be a multiple of {FRAMES_A_TOKEN}, "
                    "since two frames merge to a token: repeat the last frame, as the model's processor does"
                )
        return super().item(modality, grids)

    def video_layout(self, tokens: int) -> list[Grid]:
        """A video, and an image if need be, that fill a budget of this many tokens with their patches."""
        frames = max(t for t in (2, 4, 6, 8) if t <= tokens)
        clip = geometry.square_grid(tokens // frames, self.merge)._replace(t=frames)
        rest = tokens % frames
        return [clip, *([geometry.square_grid(rest, self.merge)] if rest else [])]

    @property
    def tower(self) -> Any:
        """The copy that `forward` runs."""
        return self.own.vision_tower

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in merged order, what the tower's forward would compute from the grids, and the frames of a token."""
        return (
            Staged("pixels", "patches", self.pixel_shape),
            Rows("position_ids", "patches", width=2),
            Rows("frame_pairs", "tokens", width=FRAMES_A_TOKEN, shift="patches"),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """`frame_pairs` are first patches: those of the 2x2 squares of two frames that make up each token."""
        squares = np.arange(0, grid.num_patches, self.merge**2, dtype=np.int64).reshape(grid.t, -1)
        first, second = (squares, squares) if grid.t == 1 else (squares[0::2], squares[1::2])
        return {
            "position_ids": geometry.merged_positions(grid, self.merge),
            "frame_pairs": np.stack([first.ravel(), second.ravel()], axis=1),
            "cu_seqlens": geometry.frame_lengths(grid),
        }

    # forward

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's own forward, then the parts of the resampler: `(tokens, hidden)`."""
        resampler, square = self.own.resampler_model, self.merge**2
        patches: Tensor = self.run_tower(buffers, bounds).last_hidden_state
        squares = resampler.spatial_linear(patches.view(-1, square * patches.shape[-1]))
        pairs = squares[buffers.frame_pairs // square].flatten(1)
        return (resampler.after_norm(resampler.mlp(resampler.temporal_linear(pairs))),)
