"""Images and videos from what users have: paths, bytes, data URIs, URLs, arrays, tensors, file objects.

In the order of this file: names for print, telling images from videos, images, videos, files for a command line, bytes.
URLs are fetched by `onereplay.fetch`. Every failure to read one medium is a `MediaError` that names it; options that
make no sense are a `ConfigError`. Neither torch nor PyAV is imported before it is needed.
"""

import base64
import binascii
import contextlib
import glob
import io
import math
import os
import re
import sys
import urllib.parse
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from onereplay.errors import ConfigError, MediaError, MissingDependencyError
from onereplay.fetch import fetch

if TYPE_CHECKING:
    from torch import Tensor

Modality: TypeAlias = Literal["image", "video"]
ImageSource: TypeAlias = (
    "str | os.PathLike[str] | Image.Image | bytes | bytearray | memoryview | NDArray[Any] | Tensor | IO[bytes]"
)
VideoSource: TypeAlias = (
    "Video | str | os.PathLike[str] | bytes | bytearray | memoryview | NDArray[Any] | Tensor | IO[bytes] | "
    "Sequence[ImageSource]"
)

# fmt: off
IMAGE_EXTENSIONS = frozenset((
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".ico", ".j2k", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png",
    ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp",
))
VIDEO_EXTENSIONS = frozenset((
    ".3gp", ".asf", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts",
    ".webm", ".wmv",
))
# fmt: on

MAX_IMAGE_BYTES = 32 << 20
"""The largest image that is fetched from a URL, in bytes."""
MAX_VIDEO_BYTES = 512 << 20
"""The largest video that is fetched from a URL, in bytes."""


@dataclass(frozen=True, eq=False)
class Video:
    """Sampled frames of one video, in order.

    Attributes:
        frames: RGB images, all of one size.
        timestamps: when each frame is shown, in seconds from the first frame of the video.
        fps: frames per second of the sample, not of the file.
    """

    frames: tuple[Image.Image, ...]
    timestamps: tuple[float, ...]
    fps: float

    def __post_init__(self) -> None:
        if not self.frames:
            raise MediaError("<Video>", "it has no frames")
        if len(self.frames) != len(self.timestamps):
            raise MediaError("<Video>", f"{len(self.frames)} frames with {len(self.timestamps)} timestamps")
        _check_one_size(self.frames, "<Video>")

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def width(self) -> int:
        """Pixels."""
        return self.frames[0].width

    @property
    def height(self) -> int:
        """Pixels."""
        return self.frames[0].height


@dataclass(frozen=True, slots=True)
class VideoSize:
    """What `load_video` would give, without its pixels: frames after sampling, and their size in pixels."""

    num_frames: int
    width: int
    height: int


# --- Names for print --------------------------------------------------------------------------------------------------


def describe(source: object) -> str:
    """A short name of a source for messages: never its content, never the secrets of a URL."""
    match source:
        case str():
            return _describe_text(source)
        case os.PathLike():
            return _shorten(os.fsdecode(source))
        case bytes() | bytearray() | memoryview():
            return f"<{type(source).__name__} of {memoryview(source).nbytes:,} bytes>"
        case Image.Image():
            return f"<PIL image {source.width}x{source.height} {source.mode}>"
        case Video():
            return f"<Video of {len(source)} frames {source.width}x{source.height}>"
        case list() | tuple():
            return f"<{type(source).__name__} of {len(source)} frames>"
    if (shape := getattr(source, "shape", None)) is not None:
        return f"<{type(source).__name__} {getattr(source, 'dtype', '')} {tuple(shape)}>"
    name = getattr(source, "name", None)
    return f"<file {_shorten(name)}>" if isinstance(name, str) else f"<{type(source).__name__}>"


def _describe_text(text: str) -> str:
    if _is_data_uri(text):
        return f"{_shorten(text[: text.find(',') + 1] or text, 60)}… ({len(text):,} characters)"
    if _scheme(text):
        # The user part may hold a password and the query a signature: neither belongs in a log.
        try:
            parts = urllib.parse.urlsplit(text)
            return _shorten(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{'?…' * bool(parts.query)}")
        except ValueError:
            return f"{_scheme(text)}://…"
    return _shorten(text)


def _shorten(text: str, limit: int = 200) -> str:
    """One line of at most `limit` characters, the middle left out, control characters escaped."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-(limit // 2) + 1 :]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


# --- Image or video ---------------------------------------------------------------------------------------------------


def classify(source: object) -> Modality:
    """Tells an image from a video, without decoding it.

    By type first: a `Video`, a list or tuple of frames and a 4-D array are videos; a PIL image and a 2-D or 3-D array
    are images. Then by a data URI's MIME type, by the extension of a path, URL or named file, and last by the first
    bytes. An animated GIF or WebP is an image: `load_image` gives its first frame, `load_video` gives all of it.

    Raises:
        MediaError: neither the type, nor the name, nor the first bytes tell.
    """
    modality = _modality_of_type(source) or _modality_of_name(source) or _modality_of_bytes(_first_bytes(source))
    if modality is None:
        raise MediaError(
            describe(source), "cannot tell whether it is an image or a video; call load_image or load_video"
        )
    return modality


def _modality_of_type(source: object) -> Modality | None:
    if isinstance(source, (Video, list, tuple)):
        return "video"
    if isinstance(source, Image.Image):
        return "image"
    if isinstance(source, np.ndarray) or _is_tensor(source):
        ndim = cast("NDArray[Any]", source).ndim
        modalities: dict[int, Modality] = {2: "image", 3: "image", 4: "video"}
        if ndim not in modalities:
            raise MediaError(describe(source), f"{ndim} dimensions; an image has 2 or 3, a video 4")
        return modalities[ndim]
    return None


def _modality_of_name(source: object) -> Modality | None:
    if isinstance(source, str) and _is_data_uri(source):
        kind = source[len("data:") :].split("/", 1)[0].lower()
        return cast("Modality", kind) if kind in ("image", "video") else None
    if isinstance(source, str) and _scheme(source):
        return _modality_of_suffix(_split_url(source).path)
    name = os.fsdecode(source) if isinstance(source, (str, os.PathLike)) else getattr(source, "name", None)
    return _modality_of_suffix(name) if isinstance(name, str) else None


def _split_url(url: str) -> urllib.parse.SplitResult:
    try:
        return urllib.parse.urlsplit(url)
    except ValueError as err:
        raise MediaError(describe(url), f"not a URL: {err}") from err


def _modality_of_suffix(name: str) -> Modality | None:
    suffix = os.path.splitext(name)[1].lower()
    if suffix in IMAGE_EXTENSIONS:
        return "image"
    return "video" if suffix in VIDEO_EXTENSIONS else None


_IMAGE_SIGNATURES = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II[*+]\0|MM\0[*+]|RIFF....WEBP|P[1-6]\s|\0\0\x01\0|\xff\x4f\xff\x51"
    rb"|\0\0\0\x0cjP  |....ftyp(?:avif|avis|heic|heix|heim|heis|mif1|msf1)",
    re.DOTALL,
)
_VIDEO_SIGNATURES = re.compile(
    rb"....(?:ftyp|moov|mdat|wide|free|skip)|\x1a\x45\xdf\xa3|RIFF....AVI |FLV\x01|\0\0\x01[\xba\xb3]|OggS"
    rb"|\x30\x26\xb2\x75|\x47.{187}\x47",
    re.DOTALL,
)


def _modality_of_bytes(head: bytes) -> Modality | None:
    if _IMAGE_SIGNATURES.match(head):
        return "image"
    return "video" if _VIDEO_SIGNATURES.match(head) else None


def _first_bytes(source: object, count: int = 256) -> bytes:
    """The first bytes of a source; none of a URL, which is not fetched for it, or of a pipe, which would lose them."""
    if isinstance(source, str) and _scheme(source):
        return b""
    if not hasattr(source, "read"):
        with _open_binary(source, allow_urls=False, max_bytes=0) as stream:
            return stream.read(count)
    if not (hasattr(source, "seek") and hasattr(source, "tell")):
        return b""
    start = source.tell()
    head = source.read(count)
    source.seek(start)
    return head if isinstance(head, bytes) else b""


# --- Images -----------------------------------------------------------------------------------------------------------


def load_image(source: ImageSource, *, allow_urls: bool = False) -> Image.Image:
    """One RGB image, upright, in memory; it shares nothing with the source.

    The EXIF orientation is applied. Transparent pixels are laid over white. 16-bit greyscale is scaled to 8 bits;
    palette, greyscale and CMYK are converted. Of an animation or a multi-page file the first image is taken.

    Args:
        source: a path; a PIL image; encoded bytes; a binary file object (read from where it stands, not closed); a
            `data:` URI; an array or a torch tensor, uint8 or float in [0, 1], of `(H, W)`, `(H, W, C)` or `(C, H, W)`
            with C of 1 (grey), 3 (RGB) or 4 (RGBA). A shape that can be read both ways, such as `(3, 64, 3)`, is
            refused.
        allow_urls: also fetch http and https URLs: at most 32 MiB, 20 seconds, from public addresses only, redirects
            too, and through no proxy.

    Raises:
        MediaError: the source is missing, empty, broken, truncated, too large, or not an image.
    """
    with _reading(source) as name:
        if isinstance(source, Image.Image):
            return _to_rgb(source, name)
        if (array := _as_array(source)) is not None:
            return _to_rgb(_image_from_array(array, name), name)
        with _open_binary(source, allow_urls, MAX_IMAGE_BYTES) as stream, Image.open(stream) as image:
            return _to_rgb(image, name)


def image_size(source: ImageSource, *, allow_urls: bool = False) -> tuple[int, int]:
    """`(width, height)` in pixels of what `load_image` gives; of a file only the header is read.

    Raises:
        MediaError: as `load_image`, except for pixels that turn out to be broken or truncated.
    """
    with _reading(source) as name:
        if (array := _as_array(source)) is not None:
            height, width, _ = _channels_last(array, name).shape
            return width, height
        if isinstance(source, Image.Image):
            return _upright_size(source, name)
        with _open_binary(source, allow_urls, MAX_IMAGE_BYTES) as stream, Image.open(stream) as image:
            return _upright_size(image, name)


@contextlib.contextmanager
def _reading(source: object) -> Iterator[str]:
    """Gives the source's name; turns whatever a decoder raises on broken data into a `MediaError`."""
    name = describe(source)
    try:
        yield name
    except (MediaError, ConfigError, MissingDependencyError, MemoryError):
        raise
    except UnidentifiedImageError as err:
        raise MediaError(name, "not an image in a format that Pillow reads, or a damaged one") from err
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as err:
        raise MediaError(name, f"too many pixels; raise PIL.Image.MAX_IMAGE_PIXELS if you trust it ({err})") from err
    except (
        Exception
    ) as err:  # Decoders raise anything on hostile data: OSError, SyntaxError, struct.error, IndexError, …
        raise MediaError(name, f"cannot be decoded: {err or type(err).__name__}") from err


def _upright_size(image: Image.Image, name: str) -> tuple[int, int]:
    if 0 in image.size:
        raise MediaError(name, f"it has no pixels ({image.width}x{image.height})")
    turned = image.getexif().get(0x0112) in (5, 6, 7, 8)  # The EXIF orientations that swap width and height.
    return (image.height, image.width) if turned else image.size


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if 0 in image.size:
        raise MediaError(name, f"it has no pixels ({image.width}x{image.height})")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":  # Pillow's "I" and "I;16" hold 16-bit values.
        full_scale = 1 if image.mode == "F" else 65535
        return Image.fromarray(_to_eight_bits(np.asarray(image), full_scale, name)).convert("RGB")
    if image.has_transparency_data:
        if image.mode == "La":  # Pillow converts the premultiplied grey only to LA.
            image = image.convert("LA")
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _to_eight_bits(array: NDArray[Any], full_scale: int, name: str) -> NDArray[np.uint8]:
    """Uint8 from pixels in [0, full_scale]; another range is refused: a guessed scale gives wrong pixels in silence."""
    low, high = array.min(), array.max()
    if not (low >= 0 and high <= full_scale):  # Written so that NaN is refused too.
        raise MediaError(
            name, f"pixels of dtype {array.dtype} from {low} to {high}; they must lie in [0, {full_scale}]"
        )
    return np.rint(array.astype(np.float64) * (255 / full_scale)).astype(np.uint8)


def _is_tensor(source: object) -> bool:
    torch = sys.modules.get("torch")  # Who passes a tensor has imported torch.
    return torch is not None and isinstance(source, torch.Tensor)


def _as_array(source: object) -> NDArray[Any] | None:
    """The array behind a numpy array or a torch tensor, on the CPU; None for anything else."""
    if isinstance(source, np.ndarray):
        return source
    if not _is_tensor(source):
        return None
    tensor = cast("Tensor", source).detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _image_from_array(array: NDArray[Any], name: str) -> Image.Image:
    array = _channels_last(array, name)
    if np.issubdtype(array.dtype, np.floating):
        array = _to_eight_bits(array, 1, name)
    if array.dtype != np.uint8:
        raise MediaError(name, f"pixels of dtype {array.dtype}; give uint8, or float in [0, 1]")
    pixels = np.ascontiguousarray(array)
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def _channels_last(array: NDArray[Any], name: str) -> NDArray[Any]:
    """`(H, W, C)` from `(H, W)`, `(H, W, C)` or `(C, H, W)`."""
    if array.size == 0:
        raise MediaError(name, "it has no pixels")
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim != 3:
        raise MediaError(name, f"{array.ndim} dimensions; an image is (H, W), (H, W, C) or (C, H, W)")
    first, last = array.shape[0] in (1, 3, 4), array.shape[2] in (1, 3, 4)
    if first and last:
        raise MediaError(name, "the channels may come first or last; pass a PIL image to say which")
    if not first and not last:
        raise MediaError(name, "no channels; an image has 1, 3 or 4 of them, first or last")
    return np.moveaxis(array, 0, 2) if first else array


# --- Videos -----------------------------------------------------------------------------------------------------------


def load_video(
    source: VideoSource, *, fps: float | None = 2.0, max_frames: int | None = None, allow_urls: bool = False
) -> Video:
    """Frames of a video, sampled evenly in time, upright and RGB.

    Sample `k` is the frame that is on screen `k / fps` seconds after the first one. When that gives more than
    `max_frames`, the samples are spread over the whole duration instead: `k * duration / max_frames`. A frame is never
    taken twice, so a higher `fps` than the file's gives each frame once. The same file and options give the same frames
    everywhere.

    Args:
        source: a path, encoded bytes, a binary file object or a `data:` URI, read with PyAV (the extra `video`). Or
            frames that are already sampled: a `Video`, a list or tuple of images, a 4-D array or tensor, one image
            along the first dimension, such as `(T, H, W, 3)` uint8; of these, only `max_frames` drops any.
        fps: samples per second; None takes every frame. Of sampled frames: the rate at which they were taken (None:
            2.0).
        max_frames: the most frames that are given; None is no bound, and then a long video can fill the memory.
        allow_urls: also fetch http and https URLs, as `load_image` does, at most 512 MiB.

    Raises:
        MediaError: the source is missing, empty, broken, truncated, or has no video stream; frames differ in size.
        ConfigError: `fps` or `max_frames` is not positive.
        MissingDependencyError: PyAV is not installed.
    """
    _check_sampling(fps, max_frames)
    if isinstance(source, Video):
        return _thin(source, max_frames)
    with _reading(source) as name:
        if isinstance(source, Image.Image):
            raise MediaError(name, "it is an image; pass a list of them, or call load_image")
        if isinstance(source, (list, tuple)) or _as_array(source) is not None:
            return _thin(_video_from_frames(source, fps or 2.0, name), max_frames)
        with _open_binary(source, allow_urls, MAX_VIDEO_BYTES) as stream:
            sample = _sample(_read_timeline(stream, name), fps, max_frames)
            frames = tuple(_decode(stream, sample, name))
        _check_one_size(frames, name)
        return Video(frames, sample.seconds, sample.fps)


def video_size(
    source: VideoSource, *, fps: float | None = 2.0, max_frames: int | None = None, allow_urls: bool = False
) -> VideoSize:
    """The number and size of the frames that `load_video` gives with these options; of a file the first is decoded.

    Raises:
        As `load_video`, except for frames that turn out to be broken.
    """
    _check_sampling(fps, max_frames)
    if isinstance(source, (Video, list, tuple)) or _as_array(source) is not None:
        video = load_video(source, fps=fps, max_frames=max_frames)
        return VideoSize(len(video), video.width, video.height)
    with _reading(source) as name, _open_binary(source, allow_urls, MAX_VIDEO_BYTES) as stream:
        sample = _sample(_read_timeline(stream, name), fps, max_frames)
        with contextlib.closing(_decode(stream, sample, name)) as frames:
            first = next(frames)
        return VideoSize(len(sample.ticks), first.width, first.height)


def _check_sampling(fps: float | None, max_frames: int | None) -> None:
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, (int, float)) or not (0 < fps < math.inf)):
        raise ConfigError(f"fps is {fps!r}; give a positive number of frames per second, or None for every frame")
    if max_frames is not None and (isinstance(max_frames, bool) or not isinstance(max_frames, int) or max_frames < 1):
        raise ConfigError(f"max_frames is {max_frames!r}; give a whole number of at least 1, or None for no bound")


def _check_one_size(frames: Sequence[Image.Image], name: str) -> None:
    for index, frame in enumerate(frames):
        if frame.size != frames[0].size:
            first = f"{frames[0].width}x{frames[0].height}"
            raise MediaError(
                name, f"frame {index} is {frame.width}x{frame.height} and frame 0 {first}; give all one size"
            )


def _thin(video: Video, max_frames: int | None) -> Video:
    """At most `max_frames` frames, evenly spread."""
    count = len(video)
    if max_frames is None or count <= max_frames:
        return video
    kept = [index * count // max_frames for index in range(max_frames)]
    frames = tuple(video.frames[index] for index in kept)
    return Video(frames, tuple(video.timestamps[index] for index in kept), video.fps * max_frames / count)


def _video_from_frames(source: Any, fps: float, name: str) -> Video:
    """A `Video` of frames that somebody sampled: a sequence of images, or an array of `(T, …)`."""
    array = _as_array(source)
    if array is not None and array.ndim != 4:
        raise MediaError(name, f"{array.ndim} dimensions; a video has 4: frames first, such as (T, H, W, 3)")
    if len(source) == 0:
        raise MediaError(name, "it has no frames")
    frames = []
    for index, frame in enumerate(source if array is None else array):
        try:
            frames.append(load_image(frame))
        except MediaError as err:
            raise MediaError(name, f"frame {index}: {err}") from err
    _check_one_size(frames, name)
    return Video(tuple(frames), tuple(index / fps for index in range(len(frames))), fps)


@dataclass(frozen=True, slots=True)
class _Timeline:
    """When a file's frames are shown, before any is decoded.

    Attributes:
        ticks: the start of each frame, rising.
        duration: ticks from the start of the first frame to the end of the last.
        tick: the unit, in seconds.
        stamped: false when the file has no timestamps (a bare H.264 stream); then ticks count frames.
    """

    ticks: tuple[int, ...]
    duration: int
    tick: Fraction
    stamped: bool

    def on_screen(self, step: Fraction) -> tuple[int, ...]:
        """The frames that are on screen at some multiple of `step` ticks after the first."""
        first = self.ticks[0]
        starts = [tick - first for tick in self.ticks]
        ends = [*starts[1:], self.duration]
        frames = zip(self.ticks, starts, ends, strict=True)
        return tuple(tick for tick, start, end in frames if math.ceil(start / step) * step < end)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Which frames of a timeline to give: their ticks, their seconds from the first frame, and the rate."""

    ticks: tuple[int, ...]
    seconds: tuple[float, ...]
    fps: float
    stamped: bool


def _sample(timeline: _Timeline, fps: float | None, max_frames: int | None) -> _Sample:
    """Even samples; exact fractions, because a rounded time near a frame's start would pick another frame elsewhere."""
    step = None if fps is None else 1 / (Fraction(fps) * timeline.tick)
    chosen = timeline.ticks if step is None else timeline.on_screen(step)
    if max_frames is not None and len(chosen) > max_frames:
        step = Fraction(timeline.duration, max_frames)
        chosen = timeline.on_screen(step)
    if step is None or len(chosen) < math.ceil(timeline.duration / step):  # Some frames stand for several samples.
        step = Fraction(timeline.duration, len(chosen))
    seconds = tuple(float((tick - chosen[0]) * timeline.tick) for tick in chosen)
    return _Sample(chosen, seconds, float(1 / (step * timeline.tick)), timeline.stamped)


def _import_av() -> Any:
    try:
        import av
    except ImportError as err:
        raise MissingDependencyError('reading a video needs PyAV: pip install "onereplay[video]"') from err
    return av


@contextlib.contextmanager
def _open_container(stream: BinaryIO, name: str) -> Iterator[tuple[Any, Any]]:
    """PyAV's container and its first video stream."""
    av = _import_av()
    stream.seek(0)
    # A playlist in place of a video could name other files or hosts; without protocols FFmpeg reads this stream only.
    try:
        container = av.open(stream, options={"protocol_whitelist": "none"})
    except av.FFmpegError as err:
        raise MediaError(name, f"not a video that FFmpeg reads, or a damaged one ({err.strerror})") from err
    with container:
        if not container.streams.video:
            raise MediaError(name, "it has no video stream")
        yield container, container.streams.video[0]


def _read_timeline(stream: BinaryIO, name: str) -> _Timeline:
    """Reads the packets' timestamps; decodes nothing."""
    with _open_container(stream, name) as (container, track):
        stamps = [packet.pts for packet in container.demux(track) if packet.size and not packet.is_discard]
        if not stamps:
            raise MediaError(name, "it has no frames")
        rate = Fraction(track.average_rate or track.guessed_rate or 25)
        if None in stamps or len(set(stamps)) < len(stamps):
            return _Timeline(tuple(range(len(stamps))), len(stamps), 1 / rate, stamped=False)
        ticks, tick = tuple(sorted(stamps)), Fraction(track.time_base)
        gaps = sorted(later - earlier for earlier, later in pairwise(ticks))
        # No file says how long its last frame lasts: as long as most do.
        last = gaps[len(gaps) // 2] if gaps else max(1, round(1 / (rate * tick)))
        return _Timeline(ticks, ticks[-1] - ticks[0] + last, tick, stamped=True)


def _decode(stream: BinaryIO, sample: _Sample, name: str) -> Generator[Image.Image, None, None]:
    """The sampled frames; when a frame of the timeline is lost, the one on screen at that time stands in for it."""
    wanted, shown = deque(sample.ticks), None
    with _open_container(stream, name) as (container, track):
        track.thread_type = "AUTO"
        for index, frame in enumerate(container.decode(track)):
            tick = frame.pts if sample.stamped and frame.pts is not None else index
            while shown is not None and wanted and wanted[0] < tick:
                wanted.popleft()
                yield _upright_frame(shown)
            shown = frame
            if not wanted:
                return
        if shown is None:
            raise MediaError(name, "none of its frames can be decoded")
        for _ in wanted:
            yield _upright_frame(shown)


def _upright_frame(frame: Any) -> Image.Image:
    image = cast("Image.Image", frame.to_image())
    turns = round(getattr(frame, "rotation", 0) / 90) % 4  # Degrees counterclockwise, from the display matrix.
    methods = (None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)
    method = methods[turns]
    return image if method is None else image.transpose(method)


# --- Files for a command line -----------------------------------------------------------------------------------------


def expand_inputs(paths: Iterable[str | os.PathLike[str]], *, recursive: bool = True) -> list[Path]:
    """The media files behind files, directories and glob patterns, in the order given, each file once.

    A file is taken whatever its name. Of a directory and of a pattern's matches, the files with an image's or a video's
    extension are taken, sorted by path; those whose name begins with a dot are left out. `**` in a pattern is any
    depth.

    Args:
        paths: what the user typed.
        recursive: also look into the directories of a directory.

    Raises:
        MediaError: a path gives no file; it is named, and nothing is skipped in silence.
    """
    found: dict[str, Path] = {}
    for path in map(os.fsdecode, paths):
        for file in _expand(path, recursive):
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _expand(path: str, recursive: bool) -> list[Path]:
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.isdir(path):
        files = _walk(path, recursive)
        reason = f"no images or videos in this directory{'' if recursive else ' itself; recursive=True looks deeper'}"
    elif glob.has_magic(path):
        files = [Path(match) for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
        reason = "this pattern matches no image or video"
    else:
        is_uri = _scheme(path) or _is_data_uri(path)
        raise MediaError(describe(path), "URLs are not files" if is_uri else "no such file or directory")
    media = sorted(file for file in files if _modality_of_suffix(file.name) and not file.name.startswith("."))
    if not media:
        raise MediaError(describe(path), reason)
    return media


def _walk(directory: str, recursive: bool) -> list[Path]:
    """Files under a directory, without hidden directories; links to directories are not followed, so it always ends."""
    files: list[Path] = []
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if recursive and not name.startswith(".")]
        files += [Path(parent, name) for name in names]
    return files


# --- Bytes ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_binary(source: object, allow_urls: bool, max_bytes: int) -> Iterator[BinaryIO]:
    """A seekable stream of a source's encoded bytes, never empty. `max_bytes` bounds a URL's answer."""
    name = describe(source)
    if isinstance(source, (str, os.PathLike)) and not _is_uri(source):
        with _open_file(Path(source), name) as stream:
            yield stream
        return
    data = _read_bytes(source, name, allow_urls, max_bytes)
    if not data:
        raise MediaError(name, "it is empty")
    yield io.BytesIO(data)


def _read_bytes(source: object, name: str, allow_urls: bool, max_bytes: int) -> bytes:
    if isinstance(source, str) and _is_data_uri(source):
        return _data_uri_bytes(source, name)
    if isinstance(source, str):
        if not allow_urls:
            raise MediaError(
                name, "URLs are not fetched; pass allow_urls=True to fetch them, or pass a file or its bytes"
            )
        return fetch(source, name, max_bytes)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if not hasattr(source, "read"):
        kinds = "a path, bytes, a data URI, an array, a tensor, a PIL image, frames or a binary file object"
        raise MediaError(name, f"objects of type {type(source).__name__} are not media; pass {kinds}")
    data = source.read()
    if not isinstance(data, bytes):
        raise MediaError(name, "the file object gives text; open it in binary mode")
    return data


def _open_file(path: Path, name: str) -> BinaryIO:
    try:
        if path.is_dir():
            raise MediaError(name, "it is a directory; expand_inputs lists the media in it")
        if not path.exists():
            raise MediaError(name, "no such file")
        if not path.is_file():
            raise MediaError(name, "not a regular file")
        if path.stat().st_size == 0:
            raise MediaError(name, "it is empty")
        return path.open("rb")
    except OSError as err:
        raise MediaError(name, err.strerror or str(err)) from err


def _is_uri(source: object) -> bool:
    return isinstance(source, str) and (_is_data_uri(source) or bool(_scheme(source)))


def _is_data_uri(text: str) -> bool:
    return text[:5].lower() == "data:"


def _scheme(text: str) -> str:
    """`https` of `https://…`, in lower case; empty for a path."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    return match[1].lower() if match else ""


def _data_uri_bytes(uri: str, name: str) -> bytes:
    """The content of `data:[type][;parameters][;base64],content` (RFC 2397); blanks in base64 are ignored."""
    header, comma, content = uri[len("data:") :].partition(",")
    if not comma:
        raise MediaError(name, "a data URI is data:<type>;base64,<content>; this one has no comma")
    data = urllib.parse.unquote_to_bytes(content)
    if not header.lower().replace(" ", "").endswith(";base64"):
        return data
    data = b"".join(data.split())
    try:
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except binascii.Error as err:
        raise MediaError(name, f"its content is not base64 ({err})") from err
