"""MiniCPM-V 4.6: SigLIP layers over packed slices, a merge of 2x2 patches inside the tower and another behind it.

Checkpoints: `openbmb/MiniCPM-V-4.6`. Reference: `modeling_minicpmv4_6.py` of transformers 5.24 (also run with 5.17,
whose merger takes slices of one size only). An image is an overview and up to nine slices, each a sequence. After layer
`insert_layer_id` the four patches of a window attend to each other and become one row.

Patches are brought into the order of the merges first, token by token and in it window by window; attention within a
slice does not depend on their order. Then every merge is a view, windows are always four rows in a row, and both kinds
of offsets follow from `cu_seqlens`: dummy sequences are cut from rows in sixteens as well.

Capacity rule: see `PackedAdapter`. A slice has about `448**2` pixels, up to 2,048 patches when it is 256 times as long
as it is high, which bounds `max_seqlen`; a longer one is an eager forward.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.base import host_rows, refuse_unknown, tile_counts
from onereplay.adapters.packed import PackedAdapter, PackedBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged, Tail
from onereplay.core.items import Item, Modality
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid

SIDE = 2
"""The side of both merges, in rows of their time."""
WINDOW = SIDE**2

_KINDS = (
    (Modality.IMAGE, "pixel_values", "target_sizes", "num_patches_per_image", "grids"),
    (Modality.VIDEO, "pixel_values_videos", "target_sizes_videos", "num_patches_per_frame", "grids_videos"),
)
_FRAMES = "num_frames_per_video"
_SIZES = (*(name for kind in _KINDS for name in kind[2:]), _FRAMES)
_INPUTS = (*(kind[1] for kind in _KINDS), *_SIZES)


class MiniCPMV46(PackedAdapter):
    """MiniCPM-V 4.6."""

    model_type = "minicpmv4_6"
    parts = ("vision_tower", "merger")
    modalities = (Modality.IMAGE, Modality.VIDEO)
    entry_points: ClassVar = {
        "get_image_features": ("pixel_values", "target_sizes"),
        "get_video_features": ("pixel_values_videos", "target_sizes_videos"),
    }
    stock_arguments: ClassVar = {"downsample_mode": "16x"}
    max_sequence_patches = 2048

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        vision = config.vision_config
        given = (config.downsample_mode, config.merger_times, *config.merge_kernel_size, *vision.window_kernel_size)
        if given != ("16x", 1, *[SIDE] * 4) or not 0 <= vision.insert_layer_id < vision.num_hidden_layers:
            raise UnsupportedModelError(
                f"minicpmv4_6 with downsample_mode={config.downsample_mode!r}, merger_times={config.merger_times}, "
                f"merge_kernel_size={config.merge_kernel_size}, window_kernel_size={vision.window_kernel_size} and "
                f"insert_layer_id={vision.insert_layer_id} of {vision.num_hidden_layers} layers is not supported; use "
                f"'16x', 1, (2, 2), (2, 2) and a layer of the tower, as published"
            )
        super().__init__(config, model, attention, optimize)

    # sizes

    @property
    def merge(self) -> int:
        """Two merges of 2x2."""
        return SIDE * SIDE

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @cached_property
    def patch_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a patch."""
        vision = self.config.vision_config
        return int(vision.num_channels), int(vision.patch_size), int(vision.patch_size)

    @cached_property
    def table_side(self) -> int:
        """The side of the table of positions."""
        return int(self.config.vision_config.image_size // self.config.vision_config.patch_size)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Patches in raster order, their rows in the order of the merges, and their positions in that order."""
        return (
            Staged("pixels", "patches", self.patch_shape),
            Rows("order", "patches", shift="patches", tail=Tail.IDENTITY),
            Rows("position_ids", "patches"),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The metadata of one slice."""
        windows = geometry.merge_gather(grid, SIDE)
        tokens = geometry.merge_gather(Grid(grid.t, grid.h // SIDE, grid.w // SIDE), SIDE)
        order = windows[tokens].ravel()
        return {
            "order": order,
            "position_ids": geometry.nearest_positions(grid, self.table_side)[order],
            "cu_seqlens": geometry.frame_lengths(grid),
        }

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `target_sizes` and `num_patches_per_image`; for videos `target_sizes_videos`, `num_frames_per_video` and
        `num_patches_per_frame`."""
        given = refuse_unknown(sizes, _SIZES, self.model_type)
        return tuple(
            item
            for modality, _, table, counts, _ in _KINDS
            if table in given
            for item in self._items(modality, self._grids(table, given[table]), given, counts)
        )

    def batch(self, **inputs: Any) -> PackedBatch:
        """From `pixel_values` `(1, channels, p, p * P)`, patches side by side, and `target_sizes` `(slices, 2)`; the
        same for videos, which come behind the images.

        `num_patches_per_image` says how many slices each image has; for videos `num_frames_per_video` and
        `num_patches_per_frame` do. Without them every slice is an item. `grids` place slices in the text and are not
        read.
        """
        given = refuse_unknown(inputs, _INPUTS, self.model_type)
        kinds = [kind for kind in _KINDS if {*kind[1:]} & given.keys()]
        return self.join([self._of_kind(given, *kind[:-1]) for kind in kinds])

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Grids of one frame are images of one slice, others videos of one slice a frame."""
        inputs: dict[str, Tensor] = {}
        channels, height, width = self.patch_shape
        for modality, pixels, table, _, _ in _KINDS:
            chosen = [grid for grid in grids if (grid.t > 1) == (modality is Modality.VIDEO)]
            if chosen:
                patches = sum(grid.num_patches for grid in chosen)
                shape = (1, channels, height, width * patches)
                inputs[pixels] = torch.randn(shape, generator=generator, device=generator.device)
                inputs[table] = torch.tensor([grid[1:] for grid in chosen for _ in range(grid.t)])
                if modality is Modality.VIDEO:
                    inputs[_FRAMES] = torch.tensor([grid.t for grid in chosen])
        return inputs

    def _of_kind(self, given: Mapping[str, Any], modality: Modality, *names: str) -> PackedBatch:
        pixels, table, counts = names
        if pixels not in given or table not in given:
            raise InputError(f"{pixels} and {table} come together; give both")
        grids = self._grids(table, given[table])
        items = self._items(modality, grids, given, counts)
        channels, height, width = self.patch_shape
        patches = sum(grid.num_patches for grid in grids)
        expected = (1, channels, height, width * patches)
        if tuple(given[pixels].shape) != expected:
            raise InputError(f"{pixels} has shape {tuple(given[pixels].shape)}, {table} asks for {expected}")
        rows = given[pixels].squeeze(0).unflatten(-1, (patches, width)).permute(2, 0, 1, 3)
        return PackedBatch(items, grids, (rows,))

    def _items(
        self, modality: Modality, grids: Sequence[Grid], given: Mapping[str, Any], counts: str
    ) -> tuple[Item, ...]:
        slices = tile_counts(counts, given.get(counts), len(grids))
        left = iter(grids)
        parts = [list(itertools.islice(left, count)) for count in slices]
        if modality is Modality.VIDEO and _FRAMES in given:
            frames = iter(parts)
            numbers = tile_counts(_FRAMES, given[_FRAMES], len(parts))
            parts = [list(itertools.chain(*itertools.islice(frames, number))) for number in numbers]
        return tuple(self.item(modality, part) for part in parts)

    def _grids(self, table: str, value: Any) -> tuple[Grid, ...]:
        grids = tuple(Grid(1, *row) for row in host_rows(table, value, 2))
        odd = next((grid for grid in grids if grid.h % self.merge or grid.w % self.merge), None)
        if odd is not None:
            raise InputError(f"{table} has {odd[1:]}; height and width must be multiples of {self.merge} patches")
        return grids

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower; the merge inside it is not one."""
        return self.own.vision_tower.encoder.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Embed in the order of the merges, run the layers with the first merge among them, project the second:
        `(tokens, hidden)`."""
        tower, offsets, longest = self.own.vision_tower, buffers.cu_seqlens, bounds["cu_seqlens"]
        patch, table = tower.embeddings.patch_embedding, tower.embeddings.position_embedding
        rows = linear(buffers.pixels[buffers.order].flatten(1), patch.weight.flatten(1), patch.bias)
        hidden = (rows + table(buffers.position_ids)).unsqueeze(0)
        with use_varlen(tower.config, self.attention):
            for index, layer in enumerate(tower.encoder.layers):
                hidden = layer(hidden, None, cu_seqlens=offsets, max_seqlen=longest)
                if index == tower.config.insert_layer_id:
                    hidden = _merge_windows(tower.vit_merger, hidden)
                    offsets, longest = offsets // WINDOW, longest // WINDOW
        units = tower.post_layernorm(hidden).view(-1, WINDOW * hidden.shape[-1])
        return (self.own.merger.mlp[0](units),)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a list, one tensor a slice."""
        return BaseModelOutputWithPooling(pooler_output=list(features))

    def stock_features(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """Slice by slice, as 5.17 needs it where sizes differ; sizes on the CPU: see `geometry.nearest_positions`."""
        found: list[Tensor] = []
        for entry, (pixels, table) in self.entry_points.items():
            if pixels in inputs:
                widths = [self.patch_shape[-1] * int(height * width) for height, width in inputs[table].tolist()]
                slices = inputs[pixels].to(self.device).split(widths, dim=-1)
                for part, size in zip(slices, inputs[table].cpu().split(1), strict=True):
                    found += self.stock_rows(getattr(model, entry)(part, size))
        return found


def _merge_windows(merger: Any, hidden: Tensor) -> Tensor:
    """The tower's `vit_merger` over windows that lie one behind the other: `(1, P, C)` to `(1, P / 4, C)`."""
    starts = torch.arange(0, hidden.shape[1] + 1, WINDOW, dtype=torch.int32, device=hidden.device)
    attended, _ = merger.self_attn(hidden_states=merger.layer_norm1(hidden), cu_seqlens=starts, max_seqlen=WINDOW)
    windows = (hidden + attended).view(-1, WINDOW, hidden.shape[-1])
    merged = merger.linear_2(merger.act(merger.linear_1(merger.pre_norm(windows.flatten(1)))))
    rows: Tensor = (merged + windows.mean(1)).unsqueeze(0)
    return rows
