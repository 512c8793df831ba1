"""Packed models whose processors give `pixel_values` as rows of patches and a table of grids: the Qwen line's form.

What such a model adds to `PackedAdapter` is small: its metadata (`buffers`, `piece`) and `forward`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.base import host_rows, refuse_unknown
from onereplay.adapters.packed import PackedAdapter, PackedBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import Item, Modality
from onereplay.errors import InputError
from onereplay.geometry import Grid

_KINDS = (
    (Modality.IMAGE, "pixel_values", "image_grid_thw"),
    (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
)


class GridAdapter(PackedAdapter):
    """What models with `image_grid_thw` and `video_grid_thw` share.

    The defaults are those of Qwen2-VL, whose tower takes positions and cumulative lengths ready made; a model overrides
    what differs.
    """

    parts: ClassVar[tuple[str, ...]] = ("visual",)
    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE, Modality.VIDEO)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "get_image_features": ("pixel_values", "image_grid_thw"),
        "get_video_features": ("pixel_values_videos", "video_grid_thw"),
    }

    @cached_property
    def merge(self) -> int:
        """2 in every published checkpoint."""
        return int(self.config.vision_config.spatial_merge_size)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.vision_config.out_hidden_size)

    @cached_property
    def pixel_shape(self) -> tuple[int, ...]:
        """One row of `pixel_values`: the values of a patch."""
        vision = self.config.vision_config
        return (int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2),)

    @property
    def tower(self) -> Any:
        """The copy that `forward` runs."""
        return self.own.visual

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixels in merged order, and what the tower's forward would compute from the grids."""
        return (
            Staged("pixels", "patches", self.pixel_shape),
            Rows("position_ids", "patches", width=2),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The tower's metadata for one grid."""
        return {
            "position_ids": geometry.merged_positions(grid, self.merge),
            "cu_seqlens": geometry.frame_lengths(grid),
        }

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `image_grid_thw` and `video_grid_thw`."""
        given = refuse_unknown(sizes, [table for _, _, table in _KINDS], self.model_type)
        return tuple(
            item
            for modality, _, table in _KINDS
            if table in given
            for item in map(self._item[modality], self._grids(table, given[table]))
        )

    def batch(self, **inputs: Any) -> PackedBatch:
        """From `pixel_values` `(P, patch_dim)` and `image_grid_thw` `(N, 3)`, and the same pair for videos.

        Images come first, then videos.
        """
        given = refuse_unknown(inputs, [name for kind in _KINDS for name in kind[1:]], self.model_type)
        return self.join([self._of_kind(given, *kind) for kind in _KINDS if {*kind[1:]} & given.keys()])

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Grids of one frame are images, others videos."""
        inputs = {}
        for modality, pixels, table in _KINDS:
            chosen = [grid for grid in grids if (grid.t > 1) == (modality is Modality.VIDEO)]
            if chosen:
                rows = sum(grid.num_patches for grid in chosen)
                inputs[pixels] = torch.randn(rows, *self.pixel_shape, generator=generator, device=generator.device)
                inputs[table] = torch.tensor(chosen)
        return inputs

    def _of_kind(self, given: Mapping[str, Any], modality: Modality, pixels: str, table: str) -> PackedBatch:
        if pixels not in given or table not in given:
            raise InputError(f"{pixels} and {table} come together; give both")
        grids = self._grids(table, given[table])
        items = tuple(map(self._item[modality], grids))
        expected = (sum([t * h * w for t, h, w in grids]), *self.pixel_shape)
        if given[pixels].shape != expected:
            raise InputError(f"{pixels} has shape {tuple(given[pixels].shape)}, {table} asks for {expected}")
        return PackedBatch(items, grids, (given[pixels],))

    def _grids(self, table: str, value: Any) -> tuple[Grid, ...]:
        grids = tuple(map(Grid._make, host_rows(table, value, 3)))
        merge = self.merge
        odd = [grid for grid in grids if grid[1] % merge or grid[2] % merge]
        if odd:
            raise InputError(f"{table} has {tuple(odd[0])}; height and width must be multiples of {merge} patches")
        return grids

    def stock_features(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """All rows that the stock entry points give, from pixels in the model's dtype: some do not convert them."""
        dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
        pixels = {name: inputs[name].to(dtype) for _, name, _ in _KINDS if name in inputs}
        return super().stock_features(model, {**inputs, **pixels})

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """All of the tower."""
        return self.tower.blocks  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's own forward: `(tokens, hidden)`."""
        return (self.run_tower(buffers, bounds).pooler_output,)

    def run_tower(self, buffers: Buffers, bounds: Mapping[str, int], **precomputed: Any) -> Any:
        """The output of the tower's own forward, which computes nothing from its grids.

        Args:
            buffers: with those of this class.
            bounds: as for `forward`.
            precomputed: what else this tower would compute, by the names of its parameters.
        """
        with use_varlen(self.tower.config, self.attention):
            return self.tower(
                buffers.pixels,
                **{"grid_thw": UNUSED_GRID, **precomputed},
                position_ids=buffers.position_ids,
                cu_seqlens=buffers.cu_seqlens,
                max_seqlen=bounds["cu_seqlens"],
                output_hidden_states=False,
                output_attentions=False,
                return_dict=True,
            )

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a tuple, one tensor an item."""
        return BaseModelOutputWithPooling(pooler_output=tuple(features))


UNUSED_GRID = torch.zeros(1, 3, dtype=torch.int64)
"""The tower reads its grids only for metadata that it was not given."""
