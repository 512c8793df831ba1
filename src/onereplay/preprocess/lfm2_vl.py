"""LFM2-VL: tiles of variable shape."""

from typing import Any

import torch
from PIL import Image

from onereplay.errors import InputError
from onereplay.preprocess.family import Batch, keep


class Lfm2VL:
    """One tile of variable shape for a small image; square tiles and a thumbnail of variable shape for a large one."""

    def image(self, processor: Any, image: Image.Image) -> Batch:
        self._shapes(processor, image.width, image.height)
        out = processor(images=[image], return_tensors="pt")
        batch = keep(out, "pixel_values", "pixel_attention_mask", "spatial_shapes")
        return batch | {"num_tiles": torch.tensor([len(batch["pixel_values"])])}

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        shapes = torch.tensor(self._shapes(processor, width, height))
        return {"spatial_shapes": shapes, "num_tiles": torch.tensor([len(shapes)])}

    def _shapes(self, processor: Any, width: int, height: int) -> list[tuple[int, int]]:
        """Rows and columns of patches of each tile; the steps are those of `Lfm2VlImageProcessor.resize_and_split`."""
        tokens, side, merge = processor.max_image_tokens, processor.encoder_patch_size, processor.downsample_factor
        wide, tall = processor.smart_resize(height, width, merge, processor.min_image_tokens, tokens, side)
        whole = (tall // side, wide // side)
        if whole[0] * whole[1] > processor.max_num_patches:  # The processor would give a mask shorter than its pixels.
            raise InputError(
                f"too elongated: {whole[0]}x{whole[1]} patches, at most {processor.max_num_patches} in a tile"
            )
        few, many = (processor.min_tiles, processor.max_tiles) if processor.do_image_splitting else (1, 1)
        large = processor._is_image_too_large(height, width, tokens, side, merge, processor.max_pixels_tolerance)
        if not large or few == many == 1:
            return [whole]
        *_, num_tiles = processor._get_grid_layout(height, width, few, many, processor.tile_size)
        tiles = [(processor.tile_size // side, processor.tile_size // side)] * num_tiles
        return [*tiles, whole] if processor.use_thumbnail and num_tiles > 1 else tiles
