"""DeepSeek-VL2: a tile of the whole image and tiles of its parts.

The published processor is code in a repository of its own; transformers has none. Its rule, from
`processing_deepseek_vl_v2.py` in deepseek-ai/DeepSeek-VL2: of all arrangements of tiles, the one that shows the most of
the image's pixels, then the one that leaves the least blank. The image is put into its middle with its proportions,
and grey around it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from onereplay.errors import ConfigError
from onereplay.preprocess.family import Batch


@dataclass(frozen=True)
class CropProcessor:
    """What the published processor is made of."""

    image_size: int
    """Pixels along a side of a tile."""
    candidate_resolutions: tuple[tuple[int, int], ...]
    """Width and height of every arrangement of tiles, in pixels."""
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    cropping: bool = True
    """Off, every image is one tile and the whole: the published processor does so from three images in a conversation
    on."""

    def crop(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles for an image of this size."""
        if not self.cropping:
            return 1, 1
        best = max(self.candidate_resolutions, key=lambda sides: _fit(width, height, *sides))
        return best[0] // self.image_size, best[1] // self.image_size

    def tiles(self, image: Image.Image) -> Tensor:
        """The whole, then the parts row by row: float32 `(1 + columns * rows, 3, image_size, image_size)`."""
        across, down = self.crop(*image.size)
        side = self.image_size
        whole, parts = self._padded(image, side, side), self._padded(image, across * side, down * side)
        cut = parts.view(3, down, side, across, side).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return torch.cat([whole[None], cut])

    def _padded(self, image: Image.Image, width: int, height: int) -> Tensor:
        grey = tuple(int(255 * mean) for mean in self.image_mean)
        values = np.array(ImageOps.pad(image, (width, height), color=grey), dtype=np.float32) / 255
        mean, std = (torch.tensor(channels) for channels in (self.image_mean, self.image_std))
        return ((torch.from_numpy(values) - mean) / std).permute(2, 0, 1)


def _fit(width: int, height: int, most_width: int, most_height: int) -> tuple[int, int]:
    """How well an image goes into an arrangement, the better the larger: pixels that show it, and minus the others."""
    scale = min(most_width / width, most_height / height)
    shown = min(int(width * scale) * int(height * scale), width * height)
    return shown, shown - most_width * most_height


class DeepseekVL2:
    """A tile of the whole image, and up to nine of its parts."""

    def own_processor(self, config: Any, given: Mapping[str, Any]) -> CropProcessor:
        """From the model's configuration, with what a `processor_config.json` says otherwise."""
        settings = {"candidate_resolutions": config.candidate_resolutions, **given}
        side = int(config.vision_config.image_size)
        resolutions = tuple((int(width), int(height)) for width, height in settings["candidate_resolutions"])
        odd = next((sides for sides in resolutions if min(sides) < 1 or any(length % side for length in sides)), None)
        if odd is not None or not resolutions:
            raise ConfigError(
                f"candidate_resolutions has {odd}; give multiples of the tile's {side} pixels, at least one"
            )
        names = ("image_mean", "image_std", "cropping")
        return CropProcessor(side, resolutions, **{name: settings[name] for name in names if name in settings})

    def image(self, processor: CropProcessor, image: Image.Image) -> Batch:
        return {"pixel_values": processor.tiles(image), **self.image_grid(processor, *image.size)}

    def image_grid(self, processor: CropProcessor, width: int, height: int) -> Batch:
        return {"images_spatial_crop": torch.tensor([processor.crop(width, height)])}
