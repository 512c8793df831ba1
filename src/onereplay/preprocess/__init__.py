"""From decoded images and videos to what a vision encoder takes: CPU tensors, under the names that transformers uses.

Some model types, by the `model_type` of their configuration; others give what their processors give:

    qwen2_5_vl  images: pixel_values [P, C*tp*p*p], image_grid_thw [N, 3]
                a video: pixel_values_videos [P, C*tp*p*p], video_grid_thw [1, 3]
    internvl    images: pixel_values [T, C, S, S], num_patches [N], the tiles of each image
                a video: pixel_values [F, C, S, S], num_frames [1]; a frame is one tile
    lfm2_vl     images: pixel_values [T, L, C*p*p], pixel_attention_mask [T, L], spatial_shapes [T, 2], num_tiles [N]
    deepseek_vl_v2  images: pixel_values [T, C, S, S], images_spatial_crop [N, 2], columns and rows of tiles
    deepseek_v41    images: patches [P, C, p, p], vit_grid [N, 2], rows and columns of patches

    gemma4      images: pixel_values [N, L, C*p*p], image_position_ids [N, L, 2], num_soft_tokens_per_image [N]
                a video: pixel_values_videos [F, L, C*p*p], video_position_ids [F, L, 2], num_frames_per_video [1],
                num_soft_tokens_per_video [1]
    llava, mistral3  images: pixel_values [N, C, H, W], the largest height and width, and image_sizes [N, 2]
    minicpmv4_6  images: pixel_values [1, C, p, p*P], target_sizes [T, 2], num_patches_per_image [N], slices of each

    N images, P patches, T tiles of all images, F frames, L patches that a tile is padded to, C channels,
    tp frames in a patch (2), p patch side and S tile side in pixels. Pixels are float32, sizes int64, the mask int32.

The work is done by the image processors of transformers, one image at a time, so that an error names its image; by
ours where transformers has none (`own_processor`).
`grid_of` gives the sizes alone: `onereplay plan` needs no pixels. Source: transformers 5.17 and 5.24, which agree in
all of this.
"""

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from PIL import Image

from onereplay.errors import InputError, UnsupportedModelError
from onereplay.media import Video
from onereplay.preprocess.family import Batch, Family, PixelLimits, VideoFamily, join, naming, rgb
from onereplay.preprocess.processors import load_image_processor

__all__ = ["PixelLimits", "grid_of", "load_image_processor", "own_processor", "preprocess_images", "preprocess_video"]

FAMILIES: dict[str, str] = {
    "clip": "tiles:OneTile",
    "clip_vision_model": "tiles:OneTile",
    "deepseek_ocr": "multipath:DeepseekOcr",
    "deepseek_ocr2": "multipath:DeepseekOcr2",
    "deepseek_v41": "deepseek_v41:DeepseekV41",
    "deepseek_vl": "tiles:OneTile",
    "deepseek_vl_hybrid": "tiles:OneTile",
    "deepseek_vl_v2": "deepseek_vl2:DeepseekVL2",
    "dinov2": "tiles:OneTile",
    "dinov3_vit": "tiles:OneTile",
    "ernie4_5_vl_moe": "family:Plain",
    "gemma3": "family:Plain",
    "gemma4": "gemma4:Gemma4",
    "glm46v": "family:Plain",
    "glm4v": "family:Plain",
    "glm4v_moe": "family:Plain",
    "glm_ocr": "family:Plain",
    "idefics3": "tiles:Samples",
    "internvl": "internvl:InternVL",
    "kimi_k25": "kimi_k25:KimiK25",
    "lfm2_vl": "lfm2_vl:Lfm2VL",
    "lfm3_vl": "family:Plain",
    "llama4": "family:Plain",
    "llava": "pixtral:Pixtral",
    "minicpmv4_6": "minicpmv4_6:MiniCPMV46",
    "minimax_m3_vl": "family:Plain",
    "mistral3": "pixtral:Mistral3",
    "paddleocr_vl": "family:Plain",
    "qwen2_5_omni_thinker": "qwen2_5_vl:Qwen25VL",
    "qwen2_5_vl": "qwen2_5_vl:Qwen25VL",
    "qwen2_vl": "qwen2_5_vl:Qwen25VL",
    "qwen3_5": "qwen3_vl:Qwen3VL",
    "qwen3_5_moe": "qwen3_vl:Qwen3VL",
    "qwen3_vl": "qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "qwen3_vl:Qwen3VL",
    "siglip": "tiles:OneTile",
    "siglip2": "family:Plain",
    "siglip2_vision_model": "family:Plain",
    "siglip_vision_model": "tiles:OneTile",
    "smolvlm": "tiles:Samples",
    "step3_vl": "multipath:Step",
    "step3p7": "multipath:Step",
    "step_robotics": "multipath:Step",
}
"""What preprocesses each model type: a file of this package and its class."""


def own_processor(model_type: str, config: Any, given: Any) -> Any:
    """The image processor of a model for which transformers has none; None where it has one.

    Args:
        model_type: any.
        config: the model's configuration, which says how its images are cut.
        given: the content of a processor's configuration as a mapping, for what that says otherwise; else not read.
    """
    make = getattr(_family(model_type), "own_processor", None) if model_type in FAMILIES else None
    return make(config, given if isinstance(given, Mapping) else {}) if make else None


def preprocess_images(processor: Any, model_type: str, images: Sequence[Image.Image]) -> Batch:
    """The tensors of a batch of images, in the order given; the module's docstring lists them.

    Args:
        processor: from `load_image_processor`.
        model_type: of the model's configuration; `FAMILIES` has those that are known.
        images: decoded images, at least one.

    Raises:
        InputError: an image is refused; its index is named, and the others are not to blame.
        UnsupportedModelError: the model type is unknown here.
    """
    family = _family(model_type)
    if not images:
        raise InputError("no images; give at least one")
    parts = []
    for index, image in enumerate(images):
        with naming(f"image {index}"):
            parts.append(family.image(processor, rgb(image)))
    joined: Batch = getattr(family, "join", join)(parts)
    return joined


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
        pixel_limits: for `qwen2_vl` and `qwen2_5_vl` of one frame, by default those that `Qwen2VLVideoProcessor`
            publishes, 128 to 768 tokens; for `qwen3_vl` and `qwen3_5` of the whole video, by default those that the
            checkpoints publish, 4,096 to 25,165,824 pixels.

    Raises:
        InputError: the model takes images only, or a frame is refused; its index is named.
        UnsupportedModelError: the model type is unknown here.
    """
    family = _video_family(model_type)
    return family.video(processor, video, pixel_limits or _limits(family))


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
        model_type: of the model's configuration; `FAMILIES` has those that are known.
        width: pixels, as decoded.
        height: pixels, as decoded.
        num_frames: of a video, after sampling; None for an image.
        pixel_limits: as for `preprocess_video`.

    Returns:
        The int64 entries of `preprocess_images` or `preprocess_video`: `image_grid_thw` or `video_grid_thw`;
        `num_patches` or `num_frames`; `spatial_shapes` and `num_tiles`.

    Raises:
        InputError: the size is refused, or the model takes images only.
        UnsupportedModelError: the model type is unknown here.
    """
    if width < 1 or height < 1 or (num_frames is not None and num_frames < 1):
        raise InputError(f"a size of {width}x{height} with {num_frames} frames; give at least 1 of each")
    with naming(f"{'an image' if num_frames is None else 'a video'} of {width}x{height}"):
        if num_frames is None:
            return _family(model_type).image_grid(processor, width, height)
        family = _video_family(model_type)
        return family.video_grid(processor, width, height, num_frames, pixel_limits or _limits(family))


@functools.cache
def _family(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise UnsupportedModelError(f"no preprocessing for model type {model_type!r}; there is {', '.join(FAMILIES)}")
    module, _, name = FAMILIES[model_type].partition(":")
    found: Family = getattr(importlib.import_module(f"{__name__}.{module}"), name)()
    return found


def _limits(family: VideoFamily) -> PixelLimits:
    """The limits of videos where the caller gives none: the family's `video_limits`, if it has them."""
    found: PixelLimits = getattr(family, "video_limits", PixelLimits())
    return found


def _video_family(model_type: str) -> VideoFamily:
    found = _family(model_type)
    if not hasattr(found, "video"):
        raise InputError(
            f"{model_type} takes images only, as files; for videos of a model that takes them use its own processor "
            f"and encode_inputs, or pass the frames as images if that is what you want"
        )
    return cast(VideoFamily, found)
