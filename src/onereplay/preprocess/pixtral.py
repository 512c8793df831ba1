"""Pixtral and Mistral 3: images of any shape, padded to the largest of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch.nn.functional import pad

from onereplay.preprocess.family import Batch, Plain


class Pixtral(Plain):
    """An image within the processor's longest edge, its sides whole patches."""

    merge = 1
    """Patches a side that make a token."""

    def image(self, processor: Any, image: Image.Image) -> Batch:
        size = processor.patch_size
        side = self.merge * int(size if isinstance(size, int) else size["height"])
        return dict(processor(images=[image], patch_size={"height": side, "width": side}, return_tensors="pt"))

    def join(self, parts: Sequence[Batch]) -> Batch:
        """As the processor joins them: zeros to the right and below."""
        sizes = torch.cat([part["image_sizes"] for part in parts])
        height, width = sizes.max(0).values.tolist()
        padded = [_padded(part["pixel_values"], height, width) for part in parts]
        return {"pixel_values": torch.cat(padded), "image_sizes": sizes}


class Mistral3(Pixtral):
    """Sides are whole merged patches: `PixtralProcessor` asks its image processor for that, by the merge of 2x2 that
    every published checkpoint has in its `processor_config.json`."""

    merge = 2


def _padded(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    return pad(pixels, (0, width - pixels.shape[3], 0, height - pixels.shape[2]))
