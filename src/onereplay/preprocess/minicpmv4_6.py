"""MiniCPM-V 4.6: an overview and slices, their patches side by side in one strip."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from onereplay.preprocess.family import Batch, Plain, keep


class MiniCPMV46(Plain):
    """An image of one to ten slices; `num_patches_per_image` counts them."""

    def image(self, processor: Any, image: Image.Image) -> Batch:
        out = processor(images=[image], return_tensors="pt")
        sizes = {"target_sizes": out["target_sizes"].to(torch.int64)}
        return keep(out, "pixel_values") | sizes | {"num_patches_per_image": torch.tensor(out["num_patches_per_image"])}

    def join(self, parts: Sequence[Batch]) -> Batch:
        """As the processor joins them: one strip for all."""
        sizes = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "pixel_values"}
        return {"pixel_values": torch.cat([part["pixel_values"] for part in parts], dim=-1), **sizes}
