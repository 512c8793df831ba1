"""Kimi-K2.5: patches in raster order; a video as clips of a few frames."""

from typing import Any

import torch
from PIL import Image

from onereplay.media import Video
from onereplay.preprocess.family import Batch, PixelLimits, Plain, naming, rgb

FRAMES_A_CLIP = 4
MAX_PATCHES_OF_A_FRAME = 4096
"""Of a video's frame; what the model publishes for its video processor. An image may have four times as many."""


class KimiK25(Plain):
    """Images and frames through the same processor, which never enlarges and pads to whole merged patches.

    Source: `video_processing_kimi_k25.py` of transformers 5.24, which treats a frame like an image with fewer patches.
    """

    def video(self, processor: Any, video: Video, limits: PixelLimits) -> Batch:
        rows = []
        for index, frame in enumerate(video.frames):
            with naming(f"frame {index}"):
                rows.append(self._frame(processor, rgb(frame))["pixel_values"])
        sizes = self.video_grid(processor, video.width, video.height, len(video), limits)
        return {"pixel_values_videos": torch.cat(rows), **sizes}

    def video_grid(self, processor: Any, width: int, height: int, num_frames: int, limits: PixelLimits) -> Batch:
        grid = self._frame(processor, Image.new("RGB", (width, height)))["image_grid_thw"]
        starts = range(0, num_frames, FRAMES_A_CLIP)
        clips = [[min(FRAMES_A_CLIP, num_frames - start), *grid[0, 1:].tolist()] for start in starts]
        return {"video_grid_thw": torch.tensor(clips), "num_chunks_per_video": torch.tensor([len(clips)])}

    def _frame(self, processor: Any, frame: Image.Image) -> Batch:
        return dict(processor(images=[frame], max_patches=MAX_PATCHES_OF_A_FRAME, return_tensors="pt"))
