"""Idefics3 and SmolVLM: an image is square tiles and one of the whole; rows of images padded to one length.

Checkpoints: `HuggingFaceM4/Idefics3-8B-Llama3`, `HuggingFaceTB/SmolVLM-{256M,500M}-Instruct` and `SmolVLM-Instruct`
(all `idefics3`), `HuggingFaceTB/SmolVLM2-{256M,500M}-Video-Instruct` and `SmolVLM2-2.2B-Instruct` (`smolvlm`).
Reference: `modeling_idefics3.py` and `modeling_smolvlm.py` of transformers 5.24 (also run with 5.17), whose towers are
the same. The processors give `pixel_values` `(samples, most images, channels, side, side)`: tiles of all images of a
sample, then padding images of zeros.

* Padding images are told as the stock method tells them, by their zeros: a mask is not enough, since the video
  processor gives padding frames a mask of ones. On the CPU a look at one row of pixels settles nearly every tile. On a
  device the flags are read back, once a batch (the stock method reads there too), and not at all for one sample without
  a mask, which cannot have padding.
* Whole tiles, all that the processors make, need no mask and have one set of positions. A tile of which a mask hides a
  part brings its mask as one channel more and runs eagerly: a captured mask would cost every tile the attention kernels
  that take none.
* Positions are found in float32, as in 5.24; 5.17 rounds them to the model's dtype first, which mixes places up in
  bfloat16.

Capacity rule: see `TileAdapter`. A tile is 676 rows and 169 tokens in Idefics3, 1,024 and 64 or 729 and 81 in SmolVLM.
"""

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay.adapters.base import refuse_unknown
from onereplay.adapters.tiles import PATH, TileAdapter, TileBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Buffers, Packed
from onereplay.core.items import Item, Modality, PathSize
from onereplay.errors import InputError
from onereplay.geometry import Grid

MASKED = "a tile that pixel_attention_mask hides a part of"
"""Why such a tile runs eagerly."""


class Idefics3(TileAdapter):
    """Idefics3."""

    model_type = "idefics3"
    parts = ("vision_model", "connector")
    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE,)
    entry_points: ClassVar = {"get_image_features": ("pixel_values", "pixel_attention_mask")}
    size_names: ClassVar[tuple[str, ...]] = ("num_patches", "rows", "cols")

    # sizes

    @cached_property
    def tile_shape(self) -> tuple[int, int, int]:
        """3 x 364 x 364 in Idefics3, 512 or 384 in SmolVLM."""
        vision = self.config.vision_config
        return int(vision.num_channels), int(vision.image_size), int(vision.image_size)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    @cached_property
    def patch(self) -> int:
        """The side of a patch; a tile need not be a whole number of them (SmolVLM's 384 are 27 of 14 and 6 left)."""
        return int(self.config.vision_config.patch_size)

    def tokens_of(self, height: int, width: int) -> int:
        """The pixel shuffle merges `scale_factor` patches a side."""
        rows, columns, merge = height // self.patch, width // self.patch, int(self.config.scale_factor)
        if rows != columns or rows % merge or rows == 0:
            raise InputError(
                f"a tile of {height}x{width} pixels is {rows}x{columns} patches; {self.model_type} needs a square "
                f"whose side is a multiple of {merge} patches"
            )
        return (rows // merge) * (columns // merge)

    def patches_of(self, height: int, width: int) -> int:
        """Whole patches."""
        return (height // self.patch) * (width // self.patch)

    def image_counts(self, given: Mapping[str, Any]) -> Any:
        """From the processor's `rows` and `cols` (lists, one a sample); `num_patches` comes first.

        An image in one piece has 0 of both; one that was split has a tile of the whole behind the others.
        """
        if "num_patches" in given or not {"rows", "cols"} & given.keys():
            return super().image_counts(given)
        if not {"rows", "cols"} <= given.keys():
            raise InputError("rows and cols come together; give both")
        pairs = zip(_flat("rows", given["rows"]), _flat("cols", given["cols"]), strict=False)
        return [rows * columns + 1 if rows * columns else 1 for rows, columns in pairs]

    # pack

    def batch(self, **inputs: Any) -> TileBatch:
        """From `pixel_values` `(samples, images, channels, side, side)` and `pixel_attention_mask` of the same shape
        without channels, or both without the first dimension.

        An item is a sample with all its images, unless `num_patches` (tiles of each image, over all samples), the
        processor's `rows` and `cols`, or `num_frames` say which tiles belong together. Without samples every tile is an
        item.
        """
        names = ("pixel_values", "pixel_attention_mask", *self.size_names)
        given = refuse_unknown(inputs, names, self.model_type)
        if not given:
            return TileBatch((), ())
        if "pixel_values" not in given:
            raise InputError(f"{' and '.join(given)} go with pixel_values; give it too")
        pixels, mask = given.pop("pixel_values"), given.pop("pixel_attention_mask", None)
        samples = pixels.shape[0] if pixels.ndim == 5 else None
        tiles = pixels.flatten(0, 1) if pixels.ndim == 5 else pixels
        self.check_tiles("pixel_values", tiles)
        if mask is not None and tuple(mask.shape) != (*pixels.shape[:-3], *pixels.shape[-2:]):
            raise InputError(
                f"pixel_values has shape {tuple(pixels.shape)} and pixel_attention_mask {tuple(mask.shape)}; a mask "
                f"has the shape of the pixels without channels"
            )
        mask = None if mask is None else mask.reshape(-1, *mask.shape[-2:])
        real, whole = self._flags(tiles, mask, padded=samples != 1 and samples is not None)
        most = pixels.shape[1]
        counts = None if samples is None else [sum(real[most * row : most * (row + 1)]) for row in range(samples)]
        return self._batch(tiles, mask, real, whole, given, counts)

    def _batch(
        self,
        tiles: Tensor,
        mask: Tensor | None,
        real: Sequence[bool],
        whole: Sequence[bool],
        given: Mapping[str, Any],
        samples: Sequence[int] | None,
    ) -> TileBatch:
        """The real tiles, as views; with their masks where one of them is not whole."""
        kept = [place for place, is_real in enumerate(real) if is_real]
        hidden = not all(whole[place] for place in kept)
        if hidden and mask is not None:
            tiles = _with_channel(tiles, mask)
        parts = tuple(tiles[run.start : run.stop] for run in _runs(kept))
        if samples is None or given:
            items = self._items(self._counted(given, len(kept)), *tiles.shape[2:])
        else:
            items = tuple(self._sample(count, *tiles.shape[2:]) for count in samples)
        if hidden:
            left = iter(kept)
            items = tuple(
                Item(item.modality, item.sizes, item.unsupported or MASKED)
                if not all(whole[place] for place in itertools.islice(left, item.sizes[PATH].sequences))
                else item
                for item in items
            )
        return TileBatch(items, parts)

    def _sample(self, num_tiles: int, height: int, width: int) -> Item:
        """A sample without images is an item without tokens, as in the stock method's list."""
        if num_tiles:
            return self.item(Modality.IMAGE, num_tiles, height, width)
        return Item(Modality.IMAGE, {PATH: PathSize(0, 0, 0)})

    def _flags(self, tiles: Tensor, mask: Tensor | None, *, padded: bool) -> tuple[list[bool], list[bool]]:
        """For each tile whether it is no padding, and whether all its patches are seen; see the module."""
        real = _not_zero(tiles) if padded else torch.ones(len(tiles), dtype=torch.bool)
        whole = torch.ones(len(tiles), dtype=torch.bool) if mask is None else self._seen(mask).flatten(1).all(1)
        if real.device == whole.device:
            real, whole = torch.stack([real, whole]).unbind()
        return real.tolist(), whole.tolist()

    def _seen(self, mask: Tensor) -> Tensor:
        """Which patches have a pixel that the mask does not hide: `(tiles, height, width)` to bool `(tiles, rows,
        columns)`."""
        rows, columns = mask.shape[1] // self.patch, mask.shape[2] // self.patch
        cut: Tensor = (mask[:, : rows * self.patch, : columns * self.patch] != 0).unflatten(2, (columns, -1)).any(-1)
        seen: Tensor = cut.unflatten(1, (rows, -1)).any(2)
        return seen

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """One sample of one whole tile for each grid."""
        tiles = super().example_inputs(grids, generator)["pixel_values"]
        mask = torch.ones((len(grids), 1, *self.tile_shape[1:]), dtype=torch.int64)
        return {"pixel_values": tiles.unsqueeze(1), "pixel_attention_mask": mask}

    def pack(self, path: str, batch: TileBatch) -> Packed:
        """Masks stay behind where all tiles of the batch are whole."""
        packed = super().pack(path, batch)
        if any(item.unsupported for item in batch.items):
            return packed
        channels = self.tile_shape[0]
        return Packed(packed.sizes, packed.pieces, {"pixels": tuple(tiles[:, :channels] for tiles in batch.tiles)})

    def join(self, batches: Sequence[TileBatch]) -> TileBatch:
        """Items and tiles one behind the other; if one batch has masks, all get them."""
        most = max((tiles.shape[1] for batch in batches for tiles in batch.tiles), default=0)
        return super().join(
            [
                TileBatch(
                    batch.items,
                    tuple(
                        tiles if tiles.shape[1] == most else _with_channel(tiles, torch.ones_like(tiles[:, 0]))
                        for tiles in batch.tiles
                    ),
                )
                for batch in batches
            ]
        )

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.own.vision_model.encoder.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Patches and positions, layers, connector: `(tiles * tile_tokens, hidden)`."""
        tower = self.own.vision_model
        channels = self.tile_shape[0]
        pixels, masks = buffers.pixels[:, :channels], buffers.pixels[:, channels:]
        patches = tower.embeddings.patch_embedding(pixels)
        attention: AbstractContextManager[None]
        if masks.shape[1]:
            seen = self._seen(masks[:, 0])
            attended = seen.flatten(1)[:, None, None].expand(-1, -1, seen[0].numel(), -1)
            # Masks go to sdpa, whatever the tower's own attention takes.
            attention = use_varlen(tower.config, self.attention)
        else:
            seen = torch.ones((1, *patches.shape[2:]), dtype=torch.bool, device=patches.device)
            attended, attention = None, self.own_attention(tower.config)
        positions = tower.embeddings.position_embedding(_places(seen, tower.embeddings.num_patches_per_side))
        hidden = patches.flatten(2).transpose(1, 2) + positions
        with attention:
            for layer in tower.encoder.layers:
                hidden = layer(hidden, attended)
        features: Tensor = self.own.connector(tower.post_layernorm(hidden))
        return (features.flatten(0, 1),)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` is a list, one tensor a sample; in transformers 5.17 one tensor `(tiles, tokens, hidden)`."""
        if self._lists_samples:
            return BaseModelOutputWithPooling(pooler_output=list(features))
        return BaseModelOutputWithPooling(
            pooler_output=torch.cat(list(features)).view(-1, self.tile_tokens, self.hidden_size)
        )

    @cached_property
    def _lists_samples(self) -> bool:
        """Whether the stock method splits its result into samples; 5.24 does and 5.17 does not."""
        stock = inspect.unwrap(type(self.model).get_image_features)
        return "num_real_images_per_batch" in stock.__code__.co_varnames


class SmolVLM(Idefics3):
    """SmolVLM2; a video is one tile a frame."""

    model_type = "smolvlm"
    modalities = (Modality.IMAGE, Modality.VIDEO)
    size_names = ("num_patches", "rows", "cols", "num_frames")


def _places(seen: Tensor, side: int) -> Tensor:
    """The position of each patch in a table of `side * side`: int64 `(tiles, rows * columns)`, 0 for hidden ones.

    Rows and columns that are seen are spread over the table: row i of n takes the one that i / n of the side falls in.

    Args:
        seen: bool `(tiles, rows, columns)`.
        side: of the table.

    Source: `Idefics3VisionEmbeddings.forward` of transformers 5.24, step for step: another order of the same divisions
    rounds some places over the edge.
    """
    edges = torch.arange(1 / side, 1.0, 1 / side, device=seen.device)

    def along(number: Tensor, length: int) -> Tensor:
        steps = torch.arange(length, device=seen.device, dtype=torch.float32)
        places = (steps[None] * (1.0 / number)[:, None]).clamp(max=1.0 - 1e-6)
        return torch.bucketize(places, edges, right=True)

    rows, columns = along(seen[:, :, 0].sum(1), seen.shape[1]), along(seen[:, 0].sum(1), seen.shape[2])
    places = rows[:, :, None] * side + columns[:, None]
    return torch.where(seen, places, 0).flatten(1)


def _not_zero(tiles: Tensor) -> Tensor:
    """Whether a tile has a value other than zero: bool `(tiles,)`, where the tiles are."""
    found = (tiles[:, :, 0] != 0).flatten(1).any(1)
    if tiles.device.type != "cpu":
        return found | (tiles != 0).flatten(1).any(1)
    for place in (~found).nonzero().flatten().tolist():
        found[place] = bool((tiles[place] != 0).any())
    return found


def _with_channel(tiles: Tensor, mask: Tensor) -> Tensor:
    """The mask as one channel more."""
    return torch.cat([tiles, mask.unsqueeze(1).to(tiles.device, tiles.dtype)], dim=1)


def _runs(places: Sequence[int]) -> list[range]:
    """Ascending integers as runs of neighbours."""
    runs: list[range] = []
    for place in places:
        if runs and runs[-1].stop == place:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    return runs


def _flat(name: str, nested: Any) -> list[int]:
    """`rows` or `cols`: a list of integers for each sample, as one list."""
    try:
        listed = [list(entry) if isinstance(entry, list | tuple | Tensor) else [entry] for entry in nested]
        return [int(value) for entry in listed for value in entry]
    except (TypeError, ValueError):
        raise InputError(f"{name}={nested!r:.80} must be lists of integers, one a sample") from None
