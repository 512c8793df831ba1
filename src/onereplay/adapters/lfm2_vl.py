"""LFM2-VL: SigLIP 2 (NaFlex) layers over packed patches, and the projector over gathered units.

Checkpoints: `LiquidAI/LFM2-VL-{450M,1.6B}`. Reference: `modeling_lfm2_vl.py` and `modeling_siglip2.py` of transformers
5.24 (also run with 5.17). transformers pads every tile to the longest and masks; here the tiles lie one behind the
other, one sequence a tile, so the layers (unmodified) see no padding. Patches come in raster order.

Capacity rule: see `PackedAdapter`; an image of the processor is at most 1,024 patches a tile, which bounds
`max_seqlen`; a longer sequence is an eager forward.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.base import host_rows, refuse_unknown, tile_counts
from onereplay.adapters.packed import PackedAdapter, PackedBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import Item, Modality
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid

_INPUTS = ("pixel_values", "spatial_shapes", "pixel_attention_mask", "num_tiles")


class Lfm2VL(PackedAdapter):
    """LFM2-VL."""

    model_type = "lfm2_vl"
    parts = ("vision_tower", "multi_modal_projector")
    modalities = (Modality.IMAGE,)
    entry_points: ClassVar = {"get_image_features": ("pixel_values", "spatial_shapes", "pixel_attention_mask")}
    max_sequence_patches = 1024

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if config.vision_config.model_type != "siglip2_vision_model":
            raise UnsupportedModelError(
                f"lfm2_vl with a {config.vision_config.model_type!r} tower is not supported; use siglip2_vision_model"
            )

    # sizes

    @cached_property
    def merge(self) -> int:
        """2 in every published checkpoint."""
        return int(self.config.downsample_factor)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @cached_property
    def patch_dim(self) -> int:
        """Values of one patch row."""
        vision = self.config.vision_config
        return int(vision.num_channels * vision.patch_size**2)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in raster order; each patch's place and its tile's size; the patches of each token."""
        return (
            Staged("pixels", "patches", (self.patch_dim,)),
            Rows("places", "patches", width=4, dtype=torch.int32),
            Rows("merge_gather", "tokens", width=self.merge**2, shift="patches"),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """`places` rows are (row, column, tile height, tile width)."""
        positions = geometry.raster_positions(grid)
        sides = np.broadcast_to(np.array(grid[1:]), positions.shape)
        return {
            "places": np.concatenate([positions, sides], axis=1, dtype=np.int32, casting="same_kind"),
            "merge_gather": geometry.merge_gather(grid, self.merge),
            "cu_seqlens": geometry.frame_lengths(grid),
        }

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `spatial_shapes` and `num_tiles`."""
        given = refuse_unknown(sizes, ("spatial_shapes", "num_tiles"), self.model_type)
        return self._items(_grids(given["spatial_shapes"]), given.get("num_tiles")) if given else ()

    def batch(self, **inputs: Any) -> PackedBatch:
        """From `pixel_values` `(tiles, L, patch_dim)` and `spatial_shapes` `(tiles, 2)` in patches.

        `num_tiles` (integers) says how many tiles each image has; without it every tile is an item. The mask is implied
        by the shapes and not read.
        """
        given = refuse_unknown(inputs, _INPUTS, self.model_type)
        if not given:
            return PackedBatch((), (), ())
        if "pixel_values" not in given or "spatial_shapes" not in given:
            raise InputError("pixel_values and spatial_shapes come together; give both")
        grids = _grids(given["spatial_shapes"])
        pixels = given["pixel_values"]
        most = max((grid.num_patches for grid in grids), default=0)
        if pixels.ndim != 3 or len(pixels) != len(grids) or pixels.shape[1] < most or pixels.shape[2] != self.patch_dim:
            raise InputError(
                f"pixel_values has shape {tuple(pixels.shape)}, spatial_shapes asks for "
                f"({len(grids)}, at least {most}, {self.patch_dim})"
            )
        items = self._items(grids, given.get("num_tiles"))
        rows = tuple(tile[: grid.num_patches] for tile, grid in zip(pixels, grids, strict=True))
        return PackedBatch(items, grids, rows)

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Each grid is one tile."""
        counts = torch.tensor([grid.num_patches for grid in grids])
        longest = int(counts.max())
        mask = (torch.arange(longest) < counts[:, None]).to(torch.int32)
        shape = (len(grids), longest, self.patch_dim)
        return {
            "pixel_values": torch.randn(shape, generator=generator, device=generator.device),
            "spatial_shapes": torch.tensor([grid[1:] for grid in grids]),
            "pixel_attention_mask": mask,
        }

    def _items(self, grids: Sequence[Grid], num_tiles: Any) -> tuple[Item, ...]:
        counts = iter(tile_counts("num_tiles", num_tiles, len(grids)))
        left = iter(grids)
        return tuple(self.item(Modality.IMAGE, list(itertools.islice(left, count))) for count in counts)

    # forward

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Embed, run the layers with the offsets in place of a mask, gather units, project: `(tokens, hidden)`."""
        tower = self.own.vision_tower
        hidden = tower.embeddings.patch_embedding(buffers.pixels) + self._positions(buffers.places)
        hidden = hidden.unsqueeze(0)
        with use_varlen(tower.config, self.attention, bounds["cu_seqlens"]):
            for layer in tower.encoder.layers:
                hidden = layer(hidden, buffers.cu_seqlens)
        hidden = tower.post_layernorm(hidden).squeeze(0)
        m = self.merge
        strip = buffers.merge_gather.view(-1, m, m).transpose(0, 1).reshape(m, -1)
        return (self.own.multi_modal_projector(hidden[strip].unsqueeze(0)).view(-1, self.hidden_size),)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a list, one tensor a tile."""
        return BaseModelOutputWithPooling(pooler_output=list(features))

    def _positions(self, places: Tensor) -> Tensor:
        """The position table resized to each patch's tile: `(P, C)`.

        The weights of `interpolate(mode="bilinear", antialias=True, align_corners=False)` along each axis, in fp32: a
        triangle of half-width `max(1, table side / tile side)` around the patch's centre.
        """
        embeddings = self.own.vision_tower.embeddings
        table, side = embeddings.position_embedding.weight, embeddings.position_embedding_size
        place, sides = places.float().view(-1, 2, 2).unbind(1)
        scale = side / sides.clamp(min=1)
        centre = (place + 0.5) * scale - 0.5
        source = torch.arange(side, dtype=torch.float32, device=places.device)
        weights = (1 - (source - centre.unsqueeze(-1)).abs() / scale.clamp(min=1).unsqueeze(-1)).clamp(min=0)
        rows, columns = (weights / weights.sum(-1, keepdim=True)).unbind(1)
        both = (rows.unsqueeze(-1) * columns.unsqueeze(-2)).flatten(1)
        positions: Tensor = both @ table.float()
        return positions.to(table.dtype)


def _grids(spatial_shapes: Any) -> tuple[Grid, ...]:
    return tuple(Grid(1, *row) for row in host_rows("spatial_shapes", spatial_shapes, 2))
