"""DeepSeek-V4.1: patches of an image that keeps its proportions, as many as its tokens allow.

The published processor is code of the checkpoint; transformers has none. Its rule, from `inference/image_processor.py`:
an image of fewer pixels than `min_pixels` is enlarged to that many; then its sides are rounded up to whole patches. If
its span would be longer than `max_image_tokens`, it takes the largest box of its proportions whose span is not. The
image is put into the middle of the box with its proportions, and grey around it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from onereplay.errors import ConfigError
from onereplay.preprocess.family import Batch

GREY = (127, 127, 127)
_ENDS = 2
"""Rows of a span that begin and end it."""


@dataclass(frozen=True)
class PatchProcessor:
    """What the published processor is made of."""

    patch_size: int
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None
    """A wider image is squeezed to this many times its height."""

    def __post_init__(self) -> None:
        if min(self.patch_size, self.downsample_ratio) < 1 or self.max_image_tokens < 4 or self.min_pixels < 0:
            raise ConfigError(f"{self}: give a patch and a ratio of at least 1, 4 tokens and 0 pixels or more")

    def patch_grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches for an image of this size."""
        if self._is_wide(width, height):
            assert self.max_wh_ratio is not None
            width = int(height * self.max_wh_ratio)
        if width * height < self.min_pixels:
            growth = (self.min_pixels / (width * height)) ** 0.5
            width, height = int(width * growth), int(height * growth)
        rows, columns = (math.ceil(side / self.patch_size) for side in (height, width))
        return (rows, columns) if self.span(rows, columns) <= self.max_image_tokens else self._largest(width, height)

    def span(self, rows: int, columns: int) -> int:
        """Rows of the result of an image of so many patches."""
        down, across = (math.ceil(side / self.downsample_ratio) for side in (rows, columns))
        return down * (across + 1) + _ENDS

    def _largest(self, width: int, height: int) -> tuple[int, int]:
        """The largest grid of these proportions within `max_image_tokens`: rows times columns and one is the most that
        they leave, so columns are the root of a quadratic equation."""
        inner, ratio = self.max_image_tokens - _ENDS, height / width
        across = math.sqrt(inner / ratio + 0.25) - 0.5
        down = across * ratio
        if across < 1:
            return inner // 2 * self.downsample_ratio, self.downsample_ratio
        if down < 1:
            return self.downsample_ratio, (inner - 1) * self.downsample_ratio
        cell = self.patch_size * self.downsample_ratio
        scale = min(math.floor(across) * cell / width, math.floor(down) * cell / height)
        rows, columns = (math.floor(side * scale / self.patch_size) for side in (height, width))
        return rows, columns

    def patches(self, image: Image.Image) -> Tensor:
        """Float32 `(rows * columns, 3, patch_size, patch_size)`, row by row."""
        rows, columns = self.patch_grid(*image.size)
        box = (columns * self.patch_size, rows * self.patch_size)
        fitted = image.resize(box) if self._is_wide(*image.size) else ImageOps.pad(image, box, color=GREY)
        values = (np.array(fitted, dtype=np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)
        cut = values.reshape(rows, self.patch_size, columns, self.patch_size, 3).transpose(0, 2, 4, 1, 3)
        return torch.from_numpy(cut.reshape(rows * columns, 3, self.patch_size, self.patch_size))

    def _is_wide(self, width: int, height: int) -> bool:
        return self.max_wh_ratio is not None and width >= height * self.max_wh_ratio


class DeepseekV41:
    """Patches and their grid."""

    def own_processor(self, config: Any, given: Mapping[str, Any]) -> PatchProcessor:
        """From the model's configuration, with what a mapping says otherwise."""
        names = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels", "max_wh_ratio")
        return PatchProcessor(**{name: given.get(name, getattr(config.vision_config, name)) for name in names})

    def image(self, processor: PatchProcessor, image: Image.Image) -> Batch:
        return {"patches": processor.patches(image), **self.image_grid(processor, *image.size)}

    def image_grid(self, processor: PatchProcessor, width: int, height: int) -> Batch:
        return {"vit_grid": torch.tensor([processor.patch_grid(width, height)])}
