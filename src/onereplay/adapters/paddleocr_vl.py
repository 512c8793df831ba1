"""PaddleOCR-VL: a loop over the tower's layers in raster order, the 2x2 merge of its projector as a gather.

Checkpoint: `PaddlePaddle/PaddleOCR-VL`. Reference: `modeling_paddleocr_vl.py` of transformers 5.24 (also run with
5.17). The tower is SigLIP with rotary positions on top of a learned square table, which is resampled to each grid.
Where a patch lies on the table differs: 5.24 lets grid and table cover the same square, 5.17 lays corner on corner. The
tower says which (`interpolation_align_corners`). The projector normalizes patches, then joins the 2x2 of a token.

The model takes images alone. A grid of several frames is one sequence a frame, as in transformers; its processor gives
one frame an image.

Capacity rule: see `PackedAdapter`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from onereplay import geometry
from onereplay.adapters.base import refuse_unknown
from onereplay.adapters.grids import GridAdapter
from onereplay.adapters.interpolation import sum_taps
from onereplay.adapters.packed import PackedBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import Item, Modality
from onereplay.geometry import Grid
from onereplay.geometry.grids import Int64
from onereplay.geometry.interpolation import Float32, Int32


class PaddleOCRVL(GridAdapter):
    """PaddleOCR-VL."""

    model_type = "paddleocr_vl"
    parts = ("visual", "projector")
    modalities = (Modality.IMAGE,)
    entry_points: ClassVar = {"get_image_features": ("pixel_values", "image_grid_thw")}

    # sizes

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @cached_property
    def table_side(self) -> int:
        """27 as published: the whole patches in a row of an image of 384 pixels."""
        vision = self.config.vision_config
        return int(vision.image_size // vision.patch_size)

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """One row of `pixel_values`: a patch."""
        vision = self.config.vision_config
        return (int(vision.num_channels), int(vision.patch_size), int(vision.patch_size))

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in raster order, their places in the frame and in the table; each token's patches."""
        return (
            Staged("pixels", "patches", self.pixel_shape),
            Rows("position_ids", "patches", width=2),
            Rows("tap_indices", "patches", width=4, dtype=torch.int32),
            Rows("tap_weights", "patches", width=4, dtype=torch.float32),
            Rows("merge_gather", "tokens", width=self.merge**2, shift="patches"),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The metadata of one grid."""
        if self.own.visual.vision_model.embeddings.interpolation_align_corners:
            indices, weights = geometry.bilinear_taps(grid, self.table_side, 1)
        else:
            indices, weights = centred_taps(grid, self.table_side)
        return {
            "position_ids": geometry.raster_positions(grid),
            "tap_indices": indices,
            "tap_weights": weights,
            "merge_gather": geometry.merge_gather(grid, self.merge),
            "cu_seqlens": geometry.frame_lengths(grid),
        }

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `image_grid_thw`."""
        return super().items_of(**refuse_unknown(sizes, ("image_grid_thw",), self.model_type))

    def batch(self, **inputs: Any) -> PackedBatch:
        """From `pixel_values` `(P, channels, side, side)` and `image_grid_thw` `(N, 3)`."""
        return super().batch(**refuse_unknown(inputs, ("pixel_values", "image_grid_thw"), self.model_type))

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """All 27."""
        return self.own.visual.vision_model.encoder.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Embed, run the layers, join the patches of each token, project: `(tokens, hidden)`."""
        tower, projector = self.own.visual.vision_model, self.own.projector
        patch, table = tower.embeddings.patch_embedding, tower.embeddings.position_embedding
        hidden = linear(buffers.pixels.flatten(1), patch.weight.flatten(1), patch.bias)
        hidden = hidden + sum_taps(table.weight, buffers.tap_indices, buffers.tap_weights)
        rotation = tower.encoder.rotary_pos_emb(hidden, buffers.position_ids)
        with use_varlen(tower.config, self.attention):
            for layer in tower.encoder.layers:
                hidden = layer(
                    hidden,
                    cu_seqlens=buffers.cu_seqlens,
                    max_seqlen=bounds["cu_seqlens"],
                    position_embeddings=rotation,
                )
        patches = projector.pre_norm(tower.post_layernorm(hidden))
        units = patches[buffers.merge_gather].flatten(1)
        return (projector.linear_2(projector.act(projector.linear_1(units))),)


def centred_taps(grid: Grid, side: int) -> tuple[Int32, Float32]:
    """Four table rows of each patch in raster order and their weights: int32 and float32 `(t*h*w, 4)`.

    Grid and table cover the same square (`align_corners=False`); places beyond the table's border are those on it. In
    float32, step by step as in `get_vision_interpolation_indices_and_weights` of transformers. The weights of a patch
    add up to 1.
    """
    (down, tall), (across, wide) = (_centred_axis(length, side) for length in grid[1:])
    places = down[:, None, :, None] * side + across[None, :, None, :]
    weights = tall[:, None, :, None] * wide[None, :, None, :]
    flat = (grid.h * grid.w, 4)
    return (
        np.tile(places.reshape(flat).astype(np.int32), (grid.t, 1)),
        np.tile(weights.reshape(flat), (grid.t, 1)),
    )


def _centred_axis(length: int, side: int) -> tuple[Int64, Float32]:
    """Two places on an axis of the table for each of `length` positions, and their weights: `(length, 2)` each."""
    half = np.float32(0.5)
    source = (np.arange(length, dtype=np.float32) + half) * np.float32(side) / np.float32(length) - half
    floor = np.floor(source)
    after = source - floor
    places = np.clip(floor.astype(np.int64)[:, None] + np.arange(2), 0, side - 1)
    return places, np.stack([np.float32(1) - after, np.float32(1) - np.abs(after - np.float32(1))], axis=1)
