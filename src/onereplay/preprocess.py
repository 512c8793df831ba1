"""From decoded images and videos to what a vision encoder takes: CPU tensors, under the names that transformers uses.

Three model types, by the `model_type` of their configuration:

    qwen2_5_vl  images: pixel_values [P, C*tp*p*p], image_grid_thw [N, 3]
                a video: pixel_values_videos [P, C*tp*p*p], video_grid_thw [1, 3]
    internvl    images: pixel_values [T, C, S, S], num_patches [N], the tiles of each image
                a video: pixel_values [F, C, S, S], num_frames [1]; a frame is one tile
    lfm2_vl     images: pixel_values [T, L, C*p*p], pixel_attention_mask [T, L], spatial_shapes [T, 2], num_tiles [N]

    N images, P patches, T tiles of all images, F frames, L patches that a tile is padded to, C channels,
    tp frames in a patch (2), p patch side and S tile side in pixels. Pixels are float32, sizes int64, the mask int32.

The work is done by the image processors of transformers, one image at a time, so that an error names its image.
`grid_of` gives the sizes alone: `onereplay plan` needs no pixels. Source: transformers 5.17 and 5.24, which agree in
all of this.
"""

import contextlib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.auto.image_processing_auto import AutoImageProcessor, get_image_processor_config
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from onereplay.errors import CheckpointError, ConfigError, InputError, MissingDependencyError, UnsupportedModelError
from onereplay.media import Video, load_image

Batch = dict[str, Tensor]


# --- Processors -------------------------------------------------------------------------------------------------------


def load_image_processor(source: str | Path | Mapping[str, Any], **hub_options: Any) -> Any:
    """The image processor of a model, as transformers defines it.

    The class is the one that the configuration names, in its torchvision variant where torchvision is installed and in
    its PIL variant otherwise. It is looked up by name and not through `transformers.AutoImageProcessor`, because
    transformers 5.17 hides that class when torchvision is absent.

    Args:
        source: a local directory, a hub id, or the content of a `preprocessor_config.json` as a mapping.
        hub_options: for a hub id: `revision`, `token`, `cache_dir`, `local_files_only`.

    Raises:
        CheckpointError: the directory or the hub repository has no image processor that transformers knows.
        ConfigError: the mapping does not name an image processor that transformers knows, or has values that it
            refuses.
        MissingDependencyError: this processor exists only for torchvision (LFM2-VL), and torchvision is absent.
    """
    if isinstance(source, Mapping):
        if "image_processor_type" not in source:
            raise ConfigError(
                f"image processor: image_processor_type is missing; there is {', '.join(source) or 'no key'}"
            )
        return _build(dict(source), ConfigError, "image processor")
    config = _read_config(source, hub_options)
    if "image_processor_type" in config:
        return _build(config, CheckpointError, str(source))
    try:  # Old checkpoints name no class; transformers derives it from the model's configuration.
        return AutoImageProcessor.from_pretrained(str(source), **hub_options)
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{source}: no image processor: {err}") from err


def _read_config(source: str | Path, hub_options: Mapping[str, Any]) -> dict[str, Any]:
    path = Path(source)
    local = isinstance(source, Path) or path.is_absolute() or source.startswith(".")
    if (
        local and not path.is_dir()
    ):  # Not left to the hub client, which would ask the network for a repository "/models/x".
        raise CheckpointError(
            f"{source}: no such directory; give a directory with a preprocessor_config.json, or a hub id"
        )
    try:
        config = get_image_processor_config(str(source), **hub_options)
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{source}: no image processor: {err}") from err
    if not config:
        raise CheckpointError(f"{source}: no image processor: it has no preprocessor_config.json")
    return dict(config)


def _build(config: dict[str, Any], error: type[CheckpointError | ConfigError], where: str) -> Any:
    name = config["image_processor_type"]
    if not isinstance(name, str) or not re.fullmatch(r"\w+ImageProcessor(Fast|Pil)?", name):
        raise error(f"{where}: image_processor_type is {name!r}; it must name an image processor of transformers")
    processor_class = _class_of(name)
    if processor_class is None:
        raise error(f"{where}: transformers {transformers.__version__} has no image processor {name}")
    try:
        return processor_class.from_dict(config)
    except (TypeError, ValueError) as err:
        raise error(f"{where}: {name} refuses its configuration: {err}") from err


def _class_of(name: str) -> Any:
    """The class for what is installed; None if transformers has none of that name.

    Since transformers 5 a name stands for the torchvision variant, `<name>Pil` for the other one; `<name>Fast` is old.
    A class whose packages are missing is still there as a dummy that lists them.
    """
    base = re.sub(r"(Fast|Pil)$", "", name)
    dummy = None
    for candidate in (base, f"{base}Pil") if _has_torchvision() else (f"{base}Pil", base):
        found = getattr(transformers, candidate, None)
        if found is not None and not getattr(found, "is_dummy", False):
            return found
        dummy = dummy or found
    if not _has_torchvision() and "torchvision" in getattr(dummy, "_backends", ()):
        raise MissingDependencyError(f'{base} needs torchvision: pip install "onereplay[torchvision]"')
    return dummy


def _has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None


# --- Images and videos ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """Between how many pixels a resized frame of a Qwen2.5-VL video has, before rounding to whole merged patches."""

    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ConfigError(f"{self}: give 0 < min_pixels <= max_pixels")


def preprocess_images(processor: Any, model_type: str, images: Sequence[Image.Image]) -> Batch:
    """The tensors of a batch of images, in the order given; the module's docstring lists them.

    Args:
        processor: from `load_image_processor`.
        model_type: one of `qwen2_5_vl`, `internvl`, `lfm2_vl`.
        images: decoded images, at least one.

    Raises:
        InputError: an image is refused; its index is named, and the others are not to blame.
        UnsupportedModelError: the model type is not one of the three.
    """
    family = _family(model_type)
    if not images:
        raise InputError("no images; give at least one")
    parts = []
    for index, image in enumerate(images):
        with _naming(f"image {index}"):
            parts.append(family.image(processor, _rgb(image)))
    return _join(parts)


def preprocess_video(
    processor: Any, model_type: str, video: Video, *, pixel_limits: PixelLimits | None = None
) -> Batch:
    """The tensors of one video; the module's docstring lists them.

    Qwen2.5-VL: each frame is resized within `pixel_limits` and turned into patches by the image processor; a patch of
    the video takes its slices from consecutive frames, and the last frame is repeated to fill the last patch.
    transformers has its video processor for torchvision only; this one way serves both cases, so that a video has the
    same grid and the same tokens whatever is installed. The size rule is that of `Qwen2VLVideoProcessor`:
    `smart_resize` of one frame, between the same limits by default, whatever the number of frames (its
    `cap_pixels_per_frame` is off by default). One difference: transformers falls back to the limits of images where a
    checkpoint publishes none for videos.

    Args:
        processor: the *image* processor, from `load_image_processor`.
        model_type: `qwen2_5_vl` or `internvl`.
        video: sampled frames of one size.
        pixel_limits: for `qwen2_5_vl`; by default those that `Qwen2VLVideoProcessor` publishes, 128 to 768 tokens.

    Raises:
        InputError: the model takes images only, or a frame is refused; its index is named.
        UnsupportedModelError: the model type is not one of the three.
    """
    return _video_family(model_type).video(processor, video, pixel_limits or PixelLimits())


def grid_of(
    processor: Any,
    model_type: str,
    width: int,
    height: int,
    *,
    num_frames: int | None = None,
    pixel_limits: PixelLimits | None = None,
) -> Batch:
    """The sizes that preprocessing gives for one image or video, without its pixels.

    Args:
        processor: from `load_image_processor`.
        model_type: one of `qwen2_5_vl`, `internvl`, `lfm2_vl`.
        width: pixels, as decoded.
        height: pixels, as decoded.
        num_frames: of a video, after sampling; None for an image.
        pixel_limits: as for `preprocess_video`.

    Returns:
        The int64 entries of `preprocess_images` or `preprocess_video`: `image_grid_thw` or `video_grid_thw`;
        `num_patches` or `num_frames`; `spatial_shapes` and `num_tiles`.

    Raises:
        InputError: the size is refused, or the model takes images only.
        UnsupportedModelError: the model type is not one of the three.
    """
    if width < 1 or height < 1 or (num_frames is not None and num_frames < 1):
        raise InputError(f"a size of {width}x{height} with {num_frames} frames; give at least 1 of each")
    limits = pixel_limits or PixelLimits()
    with _naming(f"{'an image' if num_frames is None else 'a video'} of {width}x{height}"):
        if num_frames is None:
            return _family(model_type).image_grid(processor, width, height)
        return _video_family(model_type).video_grid(processor, width, height, num_frames, limits)


# --- Model types ------------------------------------------------------------------------------------------------------


class _Family(Protocol):
    """What one model type makes of an image."""

    def image(self, processor: Any, image: Image.Image) -> Batch: ...
    def image_grid(self, processor: Any, width: int, height: int) -> Batch: ...


class _VideoFamily(_Family, Protocol):
    """And of a video."""

    def video(self, processor: Any, video: Video, limits: PixelLimits) -> Batch: ...
    def video_grid(self, processor: Any, width: int, height: int, num_frames: int, limits: PixelLimits) -> Batch: ...


class _Qwen25VL:
    """Patches of two frames by `patch_size` squared pixels, in the order of the 2x2 squares that merge to a token."""

    def image(self, processor: Any, image: Image.Image) -> Batch:
        return _keep(processor(images=[image], return_tensors="pt"), "pixel_values", "image_grid_thw")

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        limits = PixelLimits(processor.size["shortest_edge"], processor.size["longest_edge"])
        return {"image_grid_thw": torch.tensor([[1, *self._patches(processor, width, height, limits)]])}

    def video(self, processor: Any, video: Video, limits: PixelLimits) -> Batch:
        side, depth = processor.patch_size, processor.temporal_patch_size
        grid = self.video_grid(processor, video.width, video.height, len(video), limits)["video_grid_thw"]
        groups, height, width = grid[0].tolist()
        size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
        # The rows of an image hold the same frame `depth` times: one of these slices is the frame's part of a patch.
        rows: Tensor | None = None
        for slot in range(groups * depth):
            index = min(slot, len(video) - 1)
            with _naming(f"frame {index}"):
                pixels = processor(images=[_rgb(video.frames[index])], size=size, return_tensors="pt")["pixel_values"]
            frame = pixels.view(height * width, -1, depth, side, side)
            rows = frame.new_empty(groups, *frame.shape) if rows is None else rows
            rows[slot // depth, :, :, slot % depth] = frame[:, :, 0]
        assert rows is not None  # A Video has frames.
        return {"pixel_values_videos": rows.flatten(2).flatten(0, 1), "video_grid_thw": grid}

    def video_grid(self, processor: Any, width: int, height: int, num_frames: int, limits: PixelLimits) -> Batch:
        groups = -(-num_frames // processor.temporal_patch_size)
        return {"video_grid_thw": torch.tensor([[groups, *self._patches(processor, width, height, limits)]])}

    def _patches(self, processor: Any, width: int, height: int, limits: PixelLimits) -> tuple[int, int]:
        """Rows and columns of patches of one image or frame."""
        factor = processor.patch_size * processor.merge_size
        tall, wide = smart_resize(height, width, factor, limits.min_pixels, limits.max_pixels)
        return tall // processor.patch_size, wide // processor.patch_size


class _InternVL:
    """Square tiles: an image is cut into up to 12 and a thumbnail, a frame is one.

    `crop_to_patches` is off in the image processor's own configuration; `InternVLProcessor` turns it on for images.
    """

    def image(self, processor: Any, image: Image.Image) -> Batch:
        out = processor(images=[image], crop_to_patches=True, return_tensors="pt")
        return _keep(out, "pixel_values", "num_patches")

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        tiles = processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        return {"num_patches": torch.tensor([tiles])}

    def video(self, processor: Any, video: Video, limits: PixelLimits) -> Batch:
        tiles = []
        for index, frame in enumerate(video.frames):
            with _naming(f"frame {index}"):
                out = processor(images=[_rgb(frame)], crop_to_patches=False, return_tensors="pt")
                tiles.append(out["pixel_values"])
        return {"pixel_values": torch.cat(tiles), "num_frames": torch.tensor([len(tiles)])}

    def video_grid(self, processor: Any, width: int, height: int, num_frames: int, limits: PixelLimits) -> Batch:
        return {"num_frames": torch.tensor([num_frames])}


class _Lfm2VL:
    """One tile of variable shape for a small image; square tiles and a thumbnail of variable shape for a large one."""

    def image(self, processor: Any, image: Image.Image) -> Batch:
        self._shapes(processor, image.width, image.height)
        out = processor(images=[image], return_tensors="pt")
        batch = _keep(out, "pixel_values", "pixel_attention_mask", "spatial_shapes")
        return batch | {"num_tiles": torch.tensor([len(batch["pixel_values"])])}

    def image_grid(self, processor: Any, width: int, height: int) -> Batch:
        shapes = torch.tensor(self._shapes(processor, width, height))
        return {"spatial_shapes": shapes, "num_tiles": torch.tensor([len(shapes)])}

    def _shapes(self, processor: Any, width: int, height: int) -> list[tuple[int, int]]:
        """Rows and columns of patches of each tile; the steps are those of `Lfm2VlImageProcessor.resize_and_split`."""
        tokens, side, merge = processor.max_image_tokens, processor.encoder_patch_size, processor.downsample_factor
        wide, tall = processor.smart_resize(height, width, merge, processor.min_image_tokens, tokens, side)
        whole = (tall // side, wide // side)
        if whole[0] * whole[1] > processor.max_num_patches:  # The processor would give a mask shorter than its pixels.
            raise InputError(
                f"too elongated: {whole[0]}x{whole[1]} patches, at most {processor.max_num_patches} in a tile"
            )
        few, many = (processor.min_tiles, processor.max_tiles) if processor.do_image_splitting else (1, 1)
        large = processor._is_image_too_large(height, width, tokens, side, merge, processor.max_pixels_tolerance)
        if not large or few == many == 1:
            return [whole]
        *_, num_tiles = processor._get_grid_layout(height, width, few, many, processor.tile_size)
        tiles = [(processor.tile_size // side, processor.tile_size // side)] * num_tiles
        return [*tiles, whole] if processor.use_thumbnail and num_tiles > 1 else tiles


_VIDEO_FAMILIES: dict[str, _VideoFamily] = {"qwen2_5_vl": _Qwen25VL(), "internvl": _InternVL()}
_FAMILIES: dict[str, _Family] = {**_VIDEO_FAMILIES, "lfm2_vl": _Lfm2VL()}


def _family(model_type: str) -> _Family:
    if model_type not in _FAMILIES:
        raise UnsupportedModelError(f"no preprocessing for model type {model_type!r}; there is {', '.join(_FAMILIES)}")
    return _FAMILIES[model_type]


def _video_family(model_type: str) -> _VideoFamily:
    _family(model_type)
    if model_type not in _VIDEO_FAMILIES:
        raise InputError(
            f"{model_type} takes images only; pass the frames of a video as images if that is what you want"
        )
    return _VIDEO_FAMILIES[model_type]


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Puts a name in front of a refusal, whether ours or a processor's."""
    try:
        yield
    except ValueError as err:
        raise InputError(f"{what}: {err}") from err


def _rgb(image: Image.Image) -> Image.Image:
    """Processors would fetch a string from the network and take other modes for other numbers of channels."""
    if not isinstance(image, Image.Image):
        raise InputError(f"it is a {type(image).__name__}, not a decoded image; read it with load_image first")
    return image if image.mode == "RGB" and 0 not in image.size else load_image(image)


def _keep(out: Mapping[str, Any], *names: str) -> Batch:
    return {name: out[name] for name in names}


def _join(parts: Sequence[Batch]) -> Batch:
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
