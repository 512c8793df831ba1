"""InternVL: square tiles."""

from typing import Any

import torch
from PIL import Image

from onereplay.media import Video
from onereplay.preprocess.family import Batch, PixelLimits, keep, naming, rgb


class InternVL:
    """Square tiles: an image is cut into up to 12 and a thumbnail, a frame is one.

    `crop_to_patches` is off in the image processor's own configuration; `InternVLProcessor` turns it on for images.
    """

    def image(self, processor: Any, image: Image.Image) -> Batch:
        out = processor(images=[image], crop_to_patches=True, return_tensors="pt")
        return keep(out, "pixel_values", "num_patches")

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        tiles = processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        return {"num_patches": torch.tensor([tiles])}

    def video(self, processor: Any, video: Video, limits: PixelLimits) -> Batch:
        tiles = []
        for index, frame in enumerate(video.frames):
            with naming(f"frame {index}"):
                out = processor(images=[rgb(frame)], crop_to_patches=False, return_tensors="pt")
                tiles.append(out["pixel_values"])
        return {"pixel_values": torch.cat(tiles), "num_frames": torch.tensor([len(tiles)])}

    def video_grid(self, processor: Any, width: int, height: int, num_frames: int, limits: PixelLimits) -> Batch:
        return {"num_frames": torch.tensor([num_frames])}
