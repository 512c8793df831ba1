"""Qwen2-VL and Qwen2.5-VL: patches of images and of videos, in the order in which they merge."""

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from onereplay.media import Video
from onereplay.preprocess.family import Batch, PixelLimits, keep, naming, rgb


class Qwen25VL:
    """Patches of two frames by `patch_size` squared pixels, in the order of the 2x2 squares that merge to a token."""

    def image(self, processor: Any, image: Image.Image) -> Batch:
        return keep(processor(images=[image], return_tensors="pt"), "pixel_values", "image_grid_thw")

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        limits = PixelLimits(processor.size["shortest_edge"], processor.size["longest_edge"])
        return {"image_grid_thw": torch.tensor([[1, *self._patches(processor, width, height, limits)]])}

    def video(self, processor: Any, video: Video, limits: PixelLimits) -> Batch:
        side, depth = processor.patch_size, processor.temporal_patch_size
        grid = self.video_grid(processor, video.width, video.height, len(video), limits)["video_grid_thw"]
        groups, height, width = grid[0].tolist()
        # The rows of an image hold the same frame `depth` times: one of these slices is the frame's part of a patch.
        rows: Tensor | None = None
        for slot in range(groups * depth):
            index = min(slot, len(video) - 1)
            with naming(f"frame {index}"):
                pixels = self.frame(processor, rgb(video.frames[index]), (height, width), limits)
            frame = pixels.view(height * width, -1, depth, side, side)
            rows = frame.new_empty(groups, *frame.shape) if rows is None else rows
            rows[slot // depth, :, :, slot % depth] = frame[:, :, 0]
        assert rows is not None  # A Video has frames.
        return {"pixel_values_videos": rows.flatten(2).flatten(0, 1), "video_grid_thw": grid}

    def frame(self, processor: Any, image: Image.Image, grid: tuple[int, int], limits: PixelLimits) -> Tensor:
        """The rows of one frame as of an image: `(rows * columns of grid, patch_dim)`."""
        size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
        rows: Tensor = processor(images=[image], size=size, return_tensors="pt")["pixel_values"]
        return rows

    def video_grid(self, processor: Any, width: int, height: int, num_frames: int, limits: PixelLimits) -> Batch:
        groups = -(-num_frames // processor.temporal_patch_size)
        return {"video_grid_thw": torch.tensor([[groups, *self._patches(processor, width, height, limits)]])}

    def _patches(self, processor: Any, width: int, height: int, limits: PixelLimits) -> tuple[int, int]:
        """Rows and columns of patches of one image or frame."""
        factor = processor.patch_size * processor.merge_size
        tall, wide = smart_resize(height, width, factor, limits.min_pixels, limits.max_pixels)
        return tall // processor.patch_size, wide // processor.patch_size
