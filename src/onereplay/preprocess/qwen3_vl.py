"""Qwen3-VL and Qwen3.5: images as Qwen2.5-VL, videos by their volume."""

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from onereplay.preprocess.family import Batch, PixelLimits
from onereplay.preprocess.qwen2_5_vl import Qwen25VL


class Qwen3VL(Qwen25VL):
    """The limits of a video are on all of its pixels, frames times height times width: more frames are smaller ones.

    The rule is `smart_resize` of `Qwen3VLVideoProcessor` with its `cap_pixels_per_frame` off, the default. A single
    frame, which that refuses, is a video of two equal frames.
    """

    video_limits = PixelLimits(4096, 25165824)
    """Of the published `video_preprocessor_config.json`; those of the class in transformers are others."""

    def video_grid(self, processor: Any, width: int, height: int, num_frames: int, limits: PixelLimits) -> Batch:
        side, depth = processor.patch_size, processor.temporal_patch_size
        tall, wide = smart_resize(
            max(num_frames, depth),
            height,
            width,
            temporal_factor=depth,
            factor=side * processor.merge_size,
            min_pixels=limits.min_pixels,
            max_pixels=limits.max_pixels,
        )
        return {"video_grid_thw": torch.tensor([[-(-num_frames // depth), tall // side, wide // side]])}

    def frame(self, processor: Any, image: Image.Image, grid: tuple[int, int], limits: PixelLimits) -> Tensor:
        height, width = (patches * processor.patch_size for patches in grid)
        resized = image.resize((width, height), Image.Resampling.BICUBIC)
        rows: Tensor = processor(images=[resized], do_resize=False, return_tensors="pt")["pixel_values"]
        return rows
