"""DeepSeek-OCR, DeepSeek-OCR-2 and Step: a global view, and local tiles of a large image."""

from typing import Any

import torch
from PIL import Image
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import get_optimal_tiled_canvas

from onereplay.preprocess.family import Batch

_NAMES = ("pixel_values", "pixel_values_local", "num_local_patches", "patches_grid")


class Step:
    """Windows of an image that is larger than the global view or long."""

    def image(self, processor: Any, image: Image.Image) -> Batch:
        out = processor(images=[image], return_tensors="pt")
        return {name: torch.as_tensor(out[name]) for name in _NAMES if name in out}

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        return {"num_local_patches": torch.tensor([processor.get_number_of_image_patches(height, width)])}


class DeepseekOcr2(Step):
    """Rows and columns of tiles in the proportion nearest to the image's."""

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        columns, rows = self._canvas(processor, width, height)
        return {"num_local_patches": torch.tensor([columns * rows if (columns, rows) != (1, 1) else 0])}

    def _canvas(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        """Columns and rows; one of each for an image without local tiles."""
        if not processor.crop_to_patches or max(width, height) <= processor.tile_size:
            return 1, 1
        tile = (processor.tile_size, processor.tile_size)
        columns, rows = get_optimal_tiled_canvas((height, width), tile, processor.min_patches, processor.max_patches)
        return int(columns), int(rows)


class DeepseekOcr(DeepseekOcr2):
    """With how the tiles lie, which the processor of DeepSeek-OCR-2 does not say."""

    def image(self, processor: Any, image: Image.Image) -> Batch:
        return self._grid(processor, image.width, image.height) | super().image(processor, image)

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        return self._grid(processor, width, height) | super().image_grid(processor, width, height)

    def _grid(self, processor: Any, width: int, height: int) -> Batch:
        return {"patches_grid": torch.tensor([self._canvas(processor, width, height)])}
