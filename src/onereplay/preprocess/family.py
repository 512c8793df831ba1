"""What the files of this package share: the two protocols, and small steps."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from onereplay.errors import ConfigError, InputError
from onereplay.media import Video, load_image

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """Between how many pixels a resized frame of a Qwen2.5-VL video has, before rounding to whole merged patches; for
    Qwen3-VL, all frames of a video together."""

    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ConfigError(f"{self}: give 0 < min_pixels <= max_pixels")


class Family(Protocol):
    """What one model type makes of an image."""

    def image(self, processor: Any, image: Image.Image) -> Batch: ...
    def image_grid(self, processor: Any, width: int, height: int) -> Batch: ...


class VideoFamily(Family, Protocol):
    """And of a video."""

    def video(self, processor: Any, video: Video, limits: PixelLimits) -> Batch: ...
    def video_grid(self, processor: Any, width: int, height: int, num_frames: int, limits: PixelLimits) -> Batch: ...


class Plain:
    """Images through the model's image processor, one at a time, with every entry that it gives.

    For processors whose output is what the adapter takes. Sizes come from a blank image of the same size: slower than
    a formula, and the processor's own answer.
    """

    def image(self, processor: Any, image: Image.Image) -> Batch:
        return dict(processor(images=[rgb(image)], return_tensors="pt"))

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        out = self.image(processor, Image.new("RGB", (width, height)))
        return {name: value for name, value in out.items() if not name.startswith("pixel")}


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Puts a name in front of a refusal, whether ours or a processor's."""
    try:
        yield
    except ValueError as err:
        raise InputError(f"{what}: {err}") from err


def rgb(image: Image.Image) -> Image.Image:
    """Processors would fetch a string from the network and take other modes for other numbers of channels."""
    if not isinstance(image, Image.Image):
        raise InputError(f"it is a {type(image).__name__}, not a decoded image; read it with load_image first")
    return image if image.mode == "RGB" and 0 not in image.size else load_image(image)


def keep(out: Mapping[str, Any], *names: str) -> Batch:
    return {name: out[name] for name in names}


def join(parts: Sequence[Batch]) -> Batch:
    """Entries one behind the other; an entry that an image has no part in (local tiles) is made of the others'."""
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}
