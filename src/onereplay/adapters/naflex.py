"""NaFlex: towers of SigLIP 2's layers over packed patches of images of any shape.

transformers pads every image or tile to the longest and masks; here they lie one behind the other, one sequence each,
so the layers (unmodified) see no padding. Patches come in raster order. Reference: `modeling_siglip2.py` of
transformers 5.24 (also run with 5.17).
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onereplay import geometry
from onereplay.adapters.base import host_rows, refuse_unknown, tile_counts
from onereplay.adapters.packed import PackedAdapter, PackedBatch
from onereplay.attention.interface import as_mask, use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import Item, Modality
from onereplay.errors import InputError
from onereplay.geometry import Grid

_INPUTS = ("pixel_values", "spatial_shapes", "pixel_attention_mask", "num_tiles")


class NaflexAdapter(PackedAdapter):
    """What models on a NaFlex tower share; they say which module that is, and what comes behind it."""

    modalities = (Modality.IMAGE,)
    max_sequence_patches = 1024

    # sizes

    @property
    def vision(self) -> Any:
        """The tower's configuration."""
        return getattr(self.config, "vision_config", self.config)

    @property
    def naflex(self) -> Any:
        """The adapter's own copy of the tower."""
        raise NotImplementedError

    @cached_property
    def patch_dim(self) -> int:
        """Values of one patch row."""
        return int(self.vision.num_channels * self.vision.patch_size**2)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in raster order; each patch's place and its tile's size."""
        return (
            Staged("pixels", "patches", (self.patch_dim,)),
            Rows("places", "patches", width=4, dtype=torch.int32),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """`places` rows are (row, column, tile height, tile width)."""
        positions = geometry.raster_positions(grid)
        sides = np.broadcast_to(np.array(grid[1:]), positions.shape)
        return {
            "places": np.concatenate([positions, sides], axis=1, dtype=np.int32, casting="same_kind"),
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

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.naflex.encoder.layers  # type: ignore[no-any-return]

    def rows(self, buffers: Buffers, bounds: Mapping[str, int]) -> Tensor:
        """Embed, run the layers with the offsets in place of a mask, the last norm: `(patches, width)`."""
        tower = self.naflex
        hidden = tower.embeddings.patch_embedding(buffers.pixels) + self._positions(buffers.places)
        hidden = hidden.unsqueeze(0)
        offsets = as_mask(buffers.cu_seqlens, bounds["cu_seqlens"])
        with use_varlen(tower.config, self.attention):
            for layer in tower.encoder.layers:
                hidden = layer(hidden, offsets)
        normed: Tensor = tower.post_layernorm(hidden).squeeze(0)
        return normed

    def _positions(self, places: Tensor) -> Tensor:
        """The position table resized to each patch's tile: `(P, C)`.

        The weights of `interpolate(mode="bilinear", antialias=True, align_corners=False)` along each axis, in fp32: a
        triangle of half-width `max(1, table side / tile side)` around the patch's centre.
        """
        embeddings = self.naflex.embeddings
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
