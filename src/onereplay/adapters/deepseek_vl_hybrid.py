"""DeepSeek-VL hybrid: every image once small through SigLIP and once large through SAM, side by side in a token.

Checkpoints: `deepseek-community/deepseek-vl-7b-{chat,base}`. Reference: `modeling_deepseek_vl_hybrid.py` and
`modeling_sam.py` of transformers 5.24 (also run with 5.17). Both towers have one tile an image, so the encoder is one
path with two pixel inputs. The SAM tower gives two maps, behind its last layer and behind its first global one; both
are brought to the grid of SigLIP and added with a learned weight, a parameter of the base model itself.

Capacity rule: see `TileAdapter`. An image is 576 tokens. A global layer of SAM holds a bias of every head, query and
key: 400 MB an image in bfloat16, in the stock forward too; lower `max_token_budget` where memory is short.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from onereplay.adapters.base import take_rows
from onereplay.adapters.deepseek_vl import DeepseekVL
from onereplay.adapters.sam import use_sliding_positions
from onereplay.adapters.tiles import PATH, TileBatch
from onereplay.core.buffers import Buffers, Declaration, Packed, Staged
from onereplay.errors import InputError
from onereplay.geometry import Grid


@dataclass(frozen=True)
class HybridBatch(TileBatch):
    """Images in two sizes."""

    large: tuple[Tensor, ...] = ()
    """Tensors `(tiles, channels, height, width)` of the same images for the second tower, in the same order."""


class DeepseekVLHybrid(DeepseekVL):
    """DeepSeek-VL hybrid."""

    model_type = "deepseek_vl_hybrid"
    parts = (
        "vision_model",
        "high_res_vision_model",
        "high_res_vision_neck",
        "high_res_vision_proj",
        "high_res_vision_alpha",
        "aligner",
    )
    entry_points = {"get_image_features": ("pixel_values", "high_res_pixel_values")}  # noqa: RUF012 declared above

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if model is not None:
            use_sliding_positions(self.own.high_res_vision_model)

    # sizes

    @cached_property
    def large_shape(self) -> tuple[int, int, int]:
        """3 x 1,024 x 1,024 in the published checkpoints."""
        vision = self.config.high_res_vision_config
        return int(vision.num_channels), int(vision.image_size), int(vision.image_size)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Two pixel inputs."""
        return (*super().buffers(), Staged("large", "sequences", self.large_shape))

    # pack

    def batch(self, **inputs: Any) -> HybridBatch:
        """From `pixel_values` and `high_res_pixel_values`, both `(tiles, channels, side, side)` of the same images."""
        large = inputs.pop("high_res_pixel_values", None)
        small = super().batch(**inputs)
        if (large is None) != (not small.tiles):
            raise InputError("pixel_values and high_res_pixel_values come together; give both")
        if large is None:
            return HybridBatch((), ())
        expected = (len(small.tiles[0]), *self.large_shape)
        if not isinstance(large, Tensor) or tuple(large.shape) != expected:
            got = tuple(large.shape) if isinstance(large, Tensor) else type(large).__name__
            raise InputError(f"high_res_pixel_values has shape {got}, pixel_values asks for {expected}")
        return HybridBatch(small.items, small.tiles, (large,))

    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Two tiles for each grid, of pixels that have nothing to do with each other."""
        large = torch.randn((len(grids), *self.large_shape), generator=generator, device=generator.device)
        return super().example_inputs(grids, generator) | {"high_res_pixel_values": large}

    def pack(self, path: str, batch: TileBatch) -> Packed:
        """Tiles carry no metadata."""
        packed = super().pack(path, batch)
        return Packed(packed.sizes, packed.pieces, {**packed.staged, "large": _large(batch)})

    def select(self, batch: TileBatch, chosen: Sequence[int]) -> HybridBatch:
        """Items with their tiles of both sizes."""
        small = super().select(batch, chosen)
        counts = [item.sizes[PATH].sequences for item in batch.items]
        return HybridBatch(small.items, small.tiles, take_rows(_large(batch), counts, chosen))

    def join(self, batches: Sequence[TileBatch]) -> HybridBatch:
        """Items and tiles of both sizes one behind the other."""
        small = super().join(batches)
        return HybridBatch(small.items, small.tiles, tuple(part for batch in batches for part in _large(batch)))

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of both towers."""
        return [*super().blocks(), *self.own.high_res_vision_model.vision_encoder.layers]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Both towers and the aligner: `(tiles * tile_tokens, hidden)`."""
        features: Tensor = self.own.aligner(self.tower_rows(buffers.pixels), self._large_rows(buffers.large))
        return (features.flatten(0, 1),)

    def _large_rows(self, pixels: Tensor) -> Tensor:
        """SAM's two maps on SigLIP's grid: `(tiles, patches of SigLIP, channels)`."""
        tower = self.own.high_res_vision_model.vision_encoder
        hidden = tower.patch_embed(pixels)
        if tower.pos_embed is not None:
            hidden = hidden + tower.pos_embed
        maps = {}
        for index, layer in enumerate(tower.layers):
            maps[index] = hidden = layer(hidden)
        first_global = maps[self.config.high_res_vision_config.global_attn_indexes[0]]
        project = self.own.high_res_vision_proj
        last = project(tower.neck(hidden))
        early = project(self.own.high_res_vision_neck(first_global))
        rows: Tensor = (last + early * self.own.high_res_vision_alpha).flatten(2).transpose(1, 2)
        return rows


def _large(batch: TileBatch) -> tuple[Tensor, ...]:
    assert isinstance(batch, HybridBatch)
    return batch.large
