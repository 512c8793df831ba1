"""Gemma 4: padded rows of patches with their positions."""

from typing import Any

import torch
from PIL import Image

from onereplay.media import Video
from onereplay.preprocess.family import Batch, PixelLimits, Plain, naming, rgb

VIDEO_SOFT_TOKENS = 70
"""The most tokens of a video's frame: what the checkpoints publish for their video processor."""


class Gemma4(Plain):
    """An image of at most the processor's `max_soft_tokens`, a frame of at most 70 tokens.

    Source: `video_processing_gemma4.py` of transformers 5.24, which treats a frame like an image (and exists for
    torchvision only; here frames are resized as images are).
    """

    def video(self, processor: Any, video: Video, limits: PixelLimits) -> Batch:
        frames = []
        for index, frame in enumerate(video.frames):
            with naming(f"frame {index}"):
                frames.append(self._frame(processor, rgb(frame)))
        return {
            "pixel_values_videos": torch.cat([frame["pixel_values"] for frame in frames]),
            "video_position_ids": torch.cat([frame["image_position_ids"] for frame in frames]),
            **_counts(frames[0], len(frames)),
        }

    def video_grid(self, processor: Any, width: int, height: int, num_frames: int, limits: PixelLimits) -> Batch:
        frame = self._frame(processor, Image.new("RGB", (width, height)))
        positions = frame["image_position_ids"].repeat(num_frames, 1, 1)
        return {"video_position_ids": positions, **_counts(frame, num_frames)}

    def _frame(self, processor: Any, frame: Image.Image) -> Batch:
        return dict(processor(images=[frame], max_soft_tokens=VIDEO_SOFT_TOKENS, return_tensors="pt"))


def _counts(frame: Batch, num_frames: int) -> Batch:
    return {
        "num_frames_per_video": torch.tensor([num_frames]),
        "num_soft_tokens_per_video": frame["num_soft_tokens_per_image"],
    }
