"""Models of tiles whose processors do not say how many tiles an image has."""

from typing import Any

import torch
from PIL import Image

from onereplay.preprocess.family import Batch, Plain


class OneTile(Plain):
    """An image is one tile (in every pixel input of the model, if there are two): DeepSeek-VL, and plain towers."""

    def image(self, processor: Any, image: Image.Image) -> Batch:
        return {**super().image(processor, image), "num_patches": torch.ones(1, dtype=torch.int64)}

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        return {"num_patches": torch.ones(1, dtype=torch.int64)}


class Samples(Plain):
    """A sample is one image of several tiles: Idefics3 and SmolVLM.

    The first dimension of pixels and mask goes, so that images of different numbers of tiles follow one another.
    """

    def image(self, processor: Any, image: Image.Image) -> Batch:
        out = {name: value[0] for name, value in super().image(processor, image).items() if name.startswith("pixel")}
        return {**out, "num_patches": torch.tensor([len(out["pixel_values"])])}
