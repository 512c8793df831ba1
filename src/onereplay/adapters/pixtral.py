"""Pixtral: the tower's layers over packed patches.

Checkpoints: `mistral-community/pixtral-12b` (`llava` with a `pixtral` tower). Reference: `modeling_pixtral.py` and
`modeling_llava.py` of transformers 5.24 (also run with 5.17). transformers convolves a padded batch, cuts the images
out of it and builds a dense mask (or offsets, with a read of the device); here the patches of each image are cut out of
the pixels on the way into the buffers, one sequence an image. The patch convolution is a product with its flattened
kernel. A token is a patch; the breaks between rows are text.

Capacity rule: see `PackedAdapter`; the processor's longest edge is the configuration's `image_size`, which bounds
`max_seqlen`; a longer sequence is an eager forward.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay import geometry
from onereplay.adapters.base import host_rows, refuse_unknown
from onereplay.adapters.packed import PackedAdapter, PackedBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Array, Buffers, Declaration, Offsets, Rows, Staged
from onereplay.core.items import Item, Modality
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid

_INPUTS = ("pixel_values", "image_sizes")


class Pixtral(PackedAdapter):
    """Pixtral."""

    model_type = "llava"
    parts = ("vision_tower", "multi_modal_projector")
    modalities = (Modality.IMAGE,)
    entry_points: ClassVar = {"get_image_features": _INPUTS}

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        tower, layer = config.vision_config.model_type, config.vision_feature_layer
        strategy = getattr(config, "vision_feature_select_strategy", "full")
        if (tower, layer, strategy) != ("pixtral", -1, "full"):
            raise UnsupportedModelError(
                f"{config.model_type} with a {tower!r} tower, vision_feature_layer={layer} and "
                f"vision_feature_select_strategy={strategy!r} is not supported; use a pixtral tower, -1 and 'full'"
            )
        super().__init__(config, model, attention, optimize)
        self.max_sequence_patches = (int(config.vision_config.image_size) // self.patch) ** 2

    # sizes

    @property
    def merge(self) -> int:
        """A token is a patch."""
        return 1

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @cached_property
    def patch(self) -> int:
        """The side of a patch, in pixels."""
        return int(self.config.vision_config.patch_size)

    @property
    def patch_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a patch."""
        return int(self.config.vision_config.num_channels), self.patch, self.patch

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Patches in raster order and their (row, column)."""
        return (
            Staged("pixels", "patches", self.patch_shape),
            Rows("position_ids", "patches", width=2),
            Offsets("cu_seqlens", of="sequences"),
        )

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The metadata of one image."""
        return {"position_ids": geometry.raster_positions(grid), "cu_seqlens": geometry.frame_lengths(grid)}

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `image_sizes`."""
        given = refuse_unknown(sizes, ("image_sizes",), self.model_type)
        grids = self._grids(host_rows("image_sizes", given["image_sizes"], 2)) if given else ()
        return tuple(self.item(Modality.IMAGE, [grid]) for grid in grids)

    def batch(self, **inputs: Any) -> PackedBatch:
        """From `pixel_values` `(N, channels, height, width)` and `image_sizes` `(N, 2)`, height and width in pixels.

        Each image lies in the top left corner of its row. Without sizes every image fills it.
        """
        given = refuse_unknown(inputs, _INPUTS, self.model_type)
        if not given:
            return PackedBatch((), (), ())
        if "pixel_values" not in given:
            raise InputError("image_sizes are the sizes of the images in pixel_values; give it too")
        pixels = given["pixel_values"]
        if pixels.ndim != 4 or pixels.shape[1] != self.patch_shape[0]:
            raise InputError(
                f"pixel_values has shape {tuple(pixels.shape)}, {self.model_type} takes (images, "
                f"{self.patch_shape[0]}, height, width)"
            )
        whole = [list(pixels.shape[2:])] * len(pixels)
        sizes = host_rows("image_sizes", given["image_sizes"], 2) if "image_sizes" in given else whole
        if len(sizes) != len(pixels) or any(h > pixels.shape[2] or w > pixels.shape[3] for h, w in sizes):
            raise InputError(f"pixel_values has shape {tuple(pixels.shape)}, image_sizes asks for {sizes!r:.80}")
        grids = self._grids(sizes)
        items = tuple(self.item(Modality.IMAGE, [grid]) for grid in grids)
        rows = [rows for image, grid in zip(pixels, grids, strict=True) for rows in self._patches(image, grid)]
        return PackedBatch(items, grids, tuple(rows))

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Every grid is an image, in a padded batch; padding is random too."""
        sizes = torch.tensor([[side * self.patch for side in grid[1:]] for grid in grids])
        shape = (len(grids), self.patch_shape[0], *sizes.max(0).values.tolist())
        pixels = torch.randn(shape, generator=generator, device=generator.device)
        return {"pixel_values": pixels, "image_sizes": sizes}

    def _grids(self, sizes: Sequence[Sequence[int]]) -> tuple[Grid, ...]:
        return tuple(Grid(1, height // self.patch, width // self.patch) for height, width in sizes)

    def _patches(self, image: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """The patches of one image, `(rows, *patch_shape)`.

        On the host a view for every line of patches: the copy into the pinned buffer is then the only one (17 ms of one
        core for 1,540x1,540 pixels, 60 with one more). On the device one tensor: a copy there costs a launch.
        """
        _, rows, columns = grid
        cut = image[:, : rows * self.patch, : columns * self.patch]
        lines = cut.unflatten(1, (rows, self.patch)).unflatten(3, (columns, self.patch)).permute(1, 3, 0, 2, 4)
        return lines.unbind(0) if image.device.type == "cpu" else (lines.flatten(0, 1),)

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.own.vision_tower.transformer.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Embed, run the layers with offsets, project: `(tokens, hidden)`."""
        tower = self.own.vision_tower
        hidden = linear(buffers.pixels.flatten(1), tower.patch_conv.weight.flatten(1))
        hidden = tower.ln_pre(hidden.unsqueeze(0))
        rotary = tower.patch_positional_embedding(hidden, buffers.position_ids)
        with use_varlen(tower.config, self.attention):
            for layer in tower.transformer.layers:
                hidden = layer(
                    hidden,
                    None,
                    position_embeddings=rotary,
                    cu_seq_lens_q=buffers.cu_seqlens,
                    max_length_q=bounds["cu_seqlens"],
                )
        return (self.project(hidden.squeeze(0), buffers),)

    def project(self, hidden: Tensor, buffers: Buffers) -> Tensor:
        """From rows of patches to tokens: `(P, width of the tower)` to `(tokens, hidden)`."""
        projected: Tensor = self.own.multi_modal_projector(hidden)
        return projected

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a tuple, one tensor an image."""
        return BaseModelOutputWithPooling(pooler_output=tuple(features))
