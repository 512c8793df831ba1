"""Media: what users hold becomes the same upright RGB pixels; what is broken becomes a `MediaError` that names it."""

import base64
import http.server
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from onereplay import fetch, media
from onereplay.errors import ConfigError, MediaError, MissingDependencyError
from onereplay.media import Video, classify, describe, expand_inputs, image_size, load_image, load_video, video_size

PHOTOS = Path(__file__).parent.parent / "examples" / "photos"


def pixels(width: int = 6, height: int = 5, channels: int = 3) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


PIXELS = pixels()
PNG = encoded(Image.fromarray(PIXELS))


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def write_video(
    path: Path, num_frames: int = 10, rate: int = 10, rotation: int | None = None, container_format: str | None = None
) -> Path:
    """Frame k is grey of value 20 * k, with a white block in its top left corner."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w", format=container_format) as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 4_000_000
        if rotation is not None:
            if not hasattr(stream, "set_display_rotation"):
                pytest.skip("this PyAV cannot write a rotation")
            stream.set_display_rotation(rotation)
        for index in range(num_frames):
            frame = np.full((48, 64, 3), 20 * index, np.uint8)
            frame[:16, :16] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def shown(video: Video) -> list[int]:
    """Which frames of `write_video` these are, read back from their grey."""
    return [round(np.asarray(frame)[20:, 20:].mean() / 20) for frame in video.frames]


# --- Images from every kind of source


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(PNG, id="bytes"),
        pytest.param(bytearray(PNG), id="bytearray"),
        pytest.param(memoryview(PNG), id="memoryview"),
        pytest.param(Image.fromarray(PIXELS), id="PIL"),
        pytest.param(PIXELS, id="numpy HWC"),
        pytest.param(PIXELS.transpose(2, 0, 1), id="numpy CHW"),
        pytest.param(PIXELS.astype(np.float32) / 255, id="numpy float"),
        pytest.param(torch.from_numpy(PIXELS.copy()), id="tensor HWC"),
        pytest.param(torch.from_numpy(PIXELS.copy()).permute(2, 0, 1), id="tensor CHW"),
        pytest.param(torch.from_numpy(PIXELS.copy()) / 255, id="tensor float"),
        pytest.param(data_uri(PNG), id="data URI"),
        pytest.param(data_uri(PNG).replace("iVBO", "iV\nBO", 1).rstrip("="), id="data URI wrapped and unpadded"),
        pytest.param("DATA:;base64," + base64.b64encode(PNG).decode(), id="data URI without a type"),
        pytest.param("data:image/png," + "".join(f"%{byte:02x}" for byte in PNG), id="data URI percent-encoded"),
    ],
)
def test_every_source_gives_the_same_pixels(source: Any) -> None:
    image = load_image(source)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), PIXELS)
    assert image_size(source) == (6, 5)
    assert classify(source) == "image"


def test_paths_and_open_files_give_the_same_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    for source in (path, str(path), io.BytesIO(PNG)):
        assert np.array_equal(np.asarray(load_image(source)), PIXELS)
    with path.open("rb") as stream:
        assert classify(stream) == "image"
        assert np.array_equal(np.asarray(load_image(stream)), PIXELS)
        assert not stream.closed


def test_the_result_shares_nothing_with_the_source() -> None:
    source = Image.fromarray(PIXELS)
    load_image(source).putpixel((0, 0), (1, 2, 3))
    assert np.array_equal(np.asarray(source), PIXELS)


@pytest.mark.parametrize("photo", ["astronaut.jpg", "chelsea.png", "rocket.jpg"])
def test_the_example_photos_load(photo: str) -> None:
    assert load_image(PHOTOS / photo).size == image_size(PHOTOS / photo)


# --- What is done to pixels


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(PIXELS), "PNG", exif=exif)
    turns = {
        1: PIXELS,
        2: PIXELS[:, ::-1],
        3: PIXELS[::-1, ::-1],
        4: PIXELS[::-1],
        5: PIXELS.transpose(1, 0, 2),
        6: np.rot90(PIXELS, -1),
        7: PIXELS[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(PIXELS),
    }
    image = load_image(data)
    assert np.array_equal(np.asarray(image), turns[orientation])
    assert image_size(data) == image.size
    assert np.array_equal(np.asarray(load_image(image)), np.asarray(image)), "applied once, not again"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "La", "RGBa"])
def test_transparent_pixels_become_white_and_opaque_ones_stay(mode: str) -> None:
    image = Image.new("RGBA", (2, 1), (10, 10, 10, 255))
    image.putpixel((0, 0), (10, 10, 10, 0))
    if mode == "P":
        image = Image.open(io.BytesIO(encoded(image, "GIF")))
        assert image.mode == "P"
    elif mode in ("La", "RGBa"):
        image = image.convert("LA" if mode == "La" else "RGBA").convert(mode)
    else:
        image = image.convert(mode)
    assert np.asarray(load_image(image)).tolist() == [[[255] * 3, [10] * 3]]


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    assert load_image(Image.new("RGBA", (1, 1), (0, 0, 0, 128))).getpixel((0, 0)) == (127, 127, 127)
    rgba = np.array([[[0, 0, 0, 128], [0, 0, 0, 255]]], np.uint8).repeat(2, 0)
    assert np.asarray(load_image(rgba))[:, :, 0].tolist() == [[127, 0]] * 2


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_is_scaled_and_not_clipped(kind: str) -> None:
    grey = np.array([[0, 257, 32768, 65535]], np.uint16)
    assert np.asarray(load_image(encoded(Image.fromarray(grey), kind)))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "LAB"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    source = Image.new("RGB", (3, 2), "white") if mode != "P" else Image.new("P", (3, 2))
    assert load_image(source.convert(mode)).mode == "RGB"


def test_a_cmyk_jpeg_keeps_its_colours() -> None:
    data = encoded(Image.new("RGB", (16, 16), (200, 30, 30)).convert("CMYK"), "JPEG", quality=95)
    assert np.allclose(np.asarray(load_image(data))[8, 8], (200, 30, 30), atol=4)  # JPEG rounding.


def test_a_float_image_must_lie_in_zero_to_one() -> None:
    assert load_image(Image.fromarray(np.full((2, 2), 0.5, np.float32))).getpixel((0, 0)) == (128, 128, 128)
    for bad in (1.5, -0.1, float("nan")):
        with pytest.raises(MediaError, match=r"must lie in \[0, 1\]"):
            load_image(np.full((8, 8, 3), bad, np.float32))


def test_of_an_animation_an_image_is_the_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert classify(data) == "image"
    assert load_image(data).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((3, 64, 3), "channels may come first or last"),
        ((64, 64, 2), "no channels"),
        ((4,), "1 dimensions"),
        ((0, 4, 3), "no pixels"),
        ((2, 64, 64, 3), "4 dimensions"),
    ],
)
def test_an_array_that_is_not_clearly_an_image_is_refused(shape: tuple[int, ...], reason: str) -> None:
    for array in (np.zeros(shape, np.uint8), torch.zeros(shape, dtype=torch.uint8)):
        with pytest.raises(MediaError, match=reason):
            load_image(array)


def test_an_array_of_other_integers_is_refused() -> None:
    with pytest.raises(MediaError, match="int64; give uint8"):
        load_image(np.zeros((8, 8, 3), np.int64))


# --- Broken images


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"not an image at all", "not an image", id="text"),
        pytest.param(PNG[:-30], "cannot be decoded", id="truncated PNG"),
        pytest.param(encoded(Image.fromarray(pixels(64, 64)), "JPEG")[:900], "cannot be decoded", id="truncated JPEG"),
        pytest.param(PNG[:20], "not an image|cannot be decoded", id="header only"),
        pytest.param(Image.new("RGB", (0, 5)), "no pixels", id="zero size"),
        pytest.param("data:image/png;base64", "no comma", id="data URI without content"),
        pytest.param("data:image/png;base64,a*b", "not base64", id="bad base64"),
        pytest.param("data:image/png;base64,", "empty", id="empty data URI"),
        pytest.param("no/such/file.png", "no such file", id="missing"),
        pytest.param("a\0b", "no such file", id="null byte"),
        pytest.param("x" * 5000, "name too long", id="long name"),
        pytest.param(io.StringIO("text"), "binary mode", id="text file"),
        pytest.param(3, "objects of type int are not media", id="int"),
        pytest.param(None, "objects of type NoneType are not media", id="None"),
        pytest.param([PNG], "objects of type list are not media", id="list"),
    ],
)
def test_what_is_not_an_image_is_a_media_error(source: Any, reason: str) -> None:
    with pytest.raises(MediaError, match=f"(?i){reason}") as caught:
        load_image(source)
    assert caught.value.source == describe(source)


def test_bad_files_are_media_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    for source, reason in ((tmp_path, "a directory"), (tmp_path / "empty.png", "empty")):
        with pytest.raises(MediaError, match=reason):
            load_image(source)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
        with pytest.raises(MediaError, match="not a regular file"):
            load_image(tmp_path / "pipe.png")


def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("1", (400, 400)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for read in (load_image, image_size):
        with pytest.raises(MediaError, match="too many pixels"):
            read(data)


# --- Names for print


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (Path("a/b.png"), "a/b.png"),
        ("a\nb\x1b[31m.png", r"a\nb\x1b[31m.png"),
        (b"12345", "<bytes of 5 bytes>"),
        (Image.new("RGB", (4, 3)), "<PIL image 4x3 RGB>"),
        (np.zeros((4, 3, 3), np.uint8), "<ndarray uint8 (4, 3, 3)>"),
        (torch.zeros(4, 3), "<Tensor torch.float32 (4, 3)>"),
        ([1, 2], "<list of 2 frames>"),
        (io.BytesIO(), "<BytesIO>"),
        ("https://me:secret@example.org/a.png?sig=secret", "https://example.org/a.png?…"),
        ("https://[bad", "https://…"),
    ],
)
def test_a_source_is_described_in_one_line_without_its_content(source: Any, expected: str) -> None:
    assert describe(source) == expected


def test_a_large_data_uri_is_not_printed() -> None:
    uri = data_uri(bytes(10_000_000))
    with pytest.raises(MediaError) as caught:
        load_image(uri)
    assert len(str(caught.value)) < 200
    assert caught.value.source == f"data:image/png;base64,… ({len(uri):,} characters)"
    assert len(describe("data:" + "x" * 10_000)) < 120
    assert len(describe("/" + "x" * 10_000)) < 250


# --- Image or video


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a.JPG", "image"),
        ("a.webp", "image"),
        (Path("a.mp4"), "video"),
        ("https://example.org/a.webm?x=1", "video"),
        ("data:video/mp4;base64,AAAA", "video"),
        (b"\x1a\x45\xdf\xa3" + bytes(60), "video"),
        (b"\0\0\0\x18ftypisom" + bytes(60), "video"),
        (b"\0\0\0\x18ftypavif" + bytes(60), "image"),
        (b"RIFF\0\0\0\0AVI LIST", "video"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image"),
        ([PIXELS, PIXELS], "video"),
        ((), "video"),
        (np.zeros((2, 4, 4, 3), np.uint8), "video"),
        (torch.zeros(2, 3, 4, 4), "video"),
        (Video((Image.new("RGB", (4, 4)),), (0.0,), 1.0), "video"),
    ],
)
def test_classify_tells_images_from_videos(source: Any, expected: str) -> None:
    assert classify(source) == expected


def test_classify_reads_the_first_bytes_and_puts_a_stream_back(tmp_path: Path) -> None:
    (tmp_path / "nameless").write_bytes(PNG)
    assert classify(tmp_path / "nameless") == "image"
    stream = io.BytesIO(b"skipped" + PNG)
    stream.seek(7)
    assert classify(stream) == "image"
    assert stream.tell() == 7
    assert load_image(stream).size == (6, 5)


@pytest.mark.parametrize(
    "source", [b"plain text", "https://example.org/picture", 3, np.zeros(3), "data:text/plain,hello", io.StringIO("x")]
)
def test_classify_does_not_guess(source: Any) -> None:
    with pytest.raises(MediaError):
        classify(source)


# --- Videos


def test_sampling_is_even_in_time(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", num_frames=12, rate=10)
    video = load_video(path)
    assert shown(video) == [0, 5, 10]
    assert video.timestamps == (0.0, 0.5, 1.0)
    assert (video.fps, len(video), video.width, video.height) == (2.0, 3, 64, 48)


@pytest.mark.parametrize(
    ("fps", "max_frames", "expected"),
    [
        (None, None, list(range(10))),
        (None, 5, [0, 2, 4, 6, 8]),
        (None, 3, [0, 3, 6]),
        (10.0, None, list(range(10))),
        (1000.0, None, list(range(10))),
        (4, None, [0, 2, 5, 7]),
        (4.0, 2, [0, 5]),
        (1.0, 8, [0]),
        (0.001, None, [0]),
    ],
)
def test_a_sample_spans_the_video_and_takes_no_frame_twice(
    tmp_path: Path, fps: float | None, max_frames: int | None, expected: list[int]
) -> None:
    path = write_video(tmp_path / "a.mp4")
    video = load_video(path, fps=fps, max_frames=max_frames)
    assert shown(video) == expected
    assert video.timestamps == pytest.approx([index / 10 for index in expected])
    size = video_size(path, fps=fps, max_frames=max_frames)
    assert (size.num_frames, size.width, size.height) == (len(expected), 64, 48)


def test_the_rate_is_that_of_the_sample(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4")
    assert load_video(path, fps=None).fps == 10.0
    assert load_video(path, fps=1000.0).fps == 10.0
    assert load_video(path, fps=10.0, max_frames=5).fps == 5.0
    assert load_video(write_video(tmp_path / "one.mp4", num_frames=1), fps=None).fps == 10.0


@pytest.mark.parametrize("name", ["a.mkv", "a.avi", "a.mov", "a.m4v"])
def test_other_containers_give_the_same_sample(tmp_path: Path, name: str) -> None:
    """`.m4v` here is a bare MPEG-4 stream, which has no timestamps: the frame rate stands in for them."""
    path = write_video(tmp_path / name, container_format="m4v" if name == "a.m4v" else None)
    video = load_video(path)
    assert shown(video) in ([0, 5], [0])  # A bare stream says 25 frames a second, whatever was encoded.
    assert shown(load_video(path, fps=None)) == list(range(10))


def test_bytes_files_and_data_uris_give_the_same_frames(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4")
    data = path.read_bytes()
    with path.open("rb") as stream:
        for source in (str(path), data, memoryview(data), io.BytesIO(data), stream, data_uri(data, "video/mp4")):
            assert classify(source) == "video"
            assert shown(load_video(source)) == [0, 5]


@pytest.mark.parametrize(
    ("rotation", "corner"), [(90, (0, -1)), (-90, (-1, 0)), (180, (-1, -1))], ids=["left", "right", "half"]
)
def test_rotation_metadata_is_applied(tmp_path: Path, rotation: int, corner: tuple[int, int]) -> None:
    """The white block is at the top left as stored; turned 90 degrees counterclockwise it is at the bottom left."""
    path = write_video(tmp_path / "a.mp4", num_frames=1, rotation=rotation)
    video = load_video(path)
    assert (video.width, video.height) == ((64, 48) if rotation == 180 else (48, 64))
    size = video_size(path)
    assert (size.width, size.height) == (video.width, video.height)
    column, row = corner
    grey = np.asarray(video.frames[0].convert("L"))
    assert grey[8 if row == 0 else row - 8, 8 if column == 0 else column - 8] > 240


def test_an_animated_gif_is_a_video_for_load_video() -> None:
    pytest.importorskip("av")
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=500)
    assert [frame.getpixel((8, 8)) for frame in load_video(data).frames] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def test_sampled_frames_are_taken_as_they_are() -> None:
    frames = [Image.fromarray(np.full((5, 6, 3), index, np.uint8)) for index in range(5)]
    stack = np.stack([np.asarray(frame) for frame in frames])
    tensor = torch.from_numpy(stack).permute(0, 3, 1, 2)
    for source in (frames, tuple(frames), stack, tensor, [encoded(frame) for frame in frames]):
        video = load_video(source)
        assert [frame.getpixel((0, 0)) for frame in video.frames] == [(index,) * 3 for index in range(5)]
        assert video.timestamps == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert load_video(video) is video
    thinned = load_video(video, max_frames=2)
    assert (thinned.timestamps, thinned.fps) == ((0.0, 1.0), 0.8)
    assert load_video(frames, fps=10.0).timestamps[1] == 0.1
    assert video_size(stack, max_frames=3).num_frames == 3


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param([], "no frames", id="no frames"),
        pytest.param(np.zeros((0, 4, 4, 3), np.uint8), "no frames", id="empty array"),
        pytest.param(np.zeros((4, 4, 3), np.uint8), "3 dimensions; a video has 4", id="one image"),
        pytest.param([PNG, b"junk"], "frame 1: <bytes of 4 bytes>: not an image", id="bad frame"),
        pytest.param([PIXELS, PIXELS[:, :5]], "frame 1 is 5x5 and frame 0 6x5", id="sizes"),
        pytest.param(Image.new("RGB", (4, 4)), "is an image", id="PIL"),
        pytest.param(b"", "empty", id="no bytes"),
        pytest.param(b"junk" * 100, "not a video", id="junk"),
        pytest.param("no/such/file.mp4", "no such file", id="missing"),
        pytest.param("https://example.org/a.mp4", "allow_urls=True", id="URL"),
    ],
)
def test_what_is_not_a_video_is_a_media_error(source: Any, reason: str) -> None:
    pytest.importorskip("av")
    with pytest.raises(MediaError, match=reason) as caught:
        load_video(source)
    assert caught.value.source == describe(source)


def test_a_truncated_or_damaged_video_is_a_media_error(tmp_path: Path) -> None:
    data = write_video(tmp_path / "a.mp4").read_bytes()
    with pytest.raises(MediaError, match=r"not a video|no video stream"):
        load_video(data[: len(data) // 2])
    damaged = bytearray(data)
    start = data.index(b"mdat") + 4
    damaged[start : start + 200] = bytes(200)
    with pytest.raises(MediaError):
        load_video(bytes(damaged))


def test_a_file_with_sound_only_is_a_media_error(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "a.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match="no video stream"):
        load_video(path)


@pytest.mark.parametrize(
    "playlist", ["#EXTM3U\n#EXTINF:1,\nfile://{path}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile a.mp4\n"]
)
def test_a_playlist_cannot_name_other_files(tmp_path: Path, playlist: str) -> None:
    path = write_video(tmp_path / "a.mp4")
    listing = tmp_path / "list.mp4"
    listing.write_text(playlist.format(path=path))
    with pytest.raises(MediaError):
        load_video(listing)


@pytest.mark.parametrize("options", [{"fps": 0}, {"fps": -1.0}, {"fps": float("nan")}, {"fps": True}, {"fps": "2"}])
def test_an_impossible_rate_is_a_config_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fps is"):
        load_video([PIXELS], **options)


@pytest.mark.parametrize("max_frames", [0, -1, 1.5, True])
def test_an_impossible_bound_is_a_config_error(max_frames: Any) -> None:
    with pytest.raises(ConfigError, match="max_frames is"):
        load_video([PIXELS], max_frames=max_frames)


def test_without_pyav_the_install_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_video(tmp_path / "a.mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "onereplay\[video\]"'):
        load_video(path)
    assert len(load_video([PIXELS, PIXELS])) == 2, "frames need no PyAV"


def test_a_video_holds_frames_of_one_size_with_a_time_each() -> None:
    frame = Image.new("RGB", (4, 4))
    for frames, times in (((), ()), ((frame,), (0.0, 1.0)), ((frame, Image.new("RGB", (4, 5))), (0.0, 1.0))):
        with pytest.raises(MediaError, match="<Video>"):
            Video(frames, times, 1.0)


def test_torch_and_pyav_are_not_imported_with_the_module() -> None:
    code = "import sys, onereplay.media as m; m.classify(b'GIF8'); sys.exit(bool({'av', 'torch'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Files for a command line


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.png", "a.JPG", "notes.txt", "sub/c.mp4", "sub/deep/d.webp", ".hidden/e.png", "._a.jpg", "odd.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["."], ["a.JPG", "b.png", "sub/c.mp4", "sub/deep/d.webp"]),
        (["sub"], ["sub/c.mp4", "sub/deep/d.webp"]),
        (["odd.bin"], ["odd.bin"]),
        (["*"], ["a.JPG", "b.png"]),
        (["**/*.webp"], ["sub/deep/d.webp"]),
        (["sub/?.mp4", "b.png"], ["sub/c.mp4", "b.png"]),
        (["b.png", ".", "b.png"], ["b.png", "a.JPG", "sub/c.mp4", "sub/deep/d.webp"]),
        ([], []),
    ],
)
def test_expansion_is_sorted_and_keeps_the_order_given(tree: Path, paths: list[str], expected: list[str]) -> None:
    assert expand_inputs(paths) == [Path(path) for path in expected]


def test_expansion_can_stay_on_the_first_level(tree: Path) -> None:
    assert expand_inputs([tree], recursive=False) == [tree / "a.JPG", tree / "b.png"]


def test_a_file_whose_name_is_a_pattern_is_a_file(tree: Path) -> None:
    (tree / "a[1].png").write_bytes(b"x")
    assert expand_inputs(["a[1].png"]) == [Path("a[1].png")]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("absent.png", "no such file or directory"),
        ("empty", "no images or videos in this directory"),
        ("*.tiff", "matches no image or video"),
        ("https://example.org/a.png", "URLs are not files"),
        (data_uri(PNG), "URLs are not files"),
    ],
)
def test_a_path_that_gives_nothing_is_named(tree: Path, path: str, reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as caught:
        expand_inputs(["b.png", path])
    assert caught.value.source == describe(path)


def test_expansion_ends_in_spite_of_a_link_to_itself(tree: Path) -> None:
    try:
        (tree / "sub" / "loop").symlink_to(tree, target_is_directory=True)
    except OSError:
        pytest.skip("no symbolic links here")
    assert len(expand_inputs([tree])) == 4


# --- URLs: a server on this machine; only the rule that refuses its address is switched off where a test says so


class Handler(http.server.BaseHTTPRequestHandler):
    pages: ClassVar[dict[str, tuple[int, dict[str, str], bytes]]] = {
        "/a.png": (200, {"Content-Length": str(len(PNG))}, PNG),
        "/endless": (200, {}, bytes(100_000)),
        "/liar": (200, {"Content-Length": "5000"}, PNG),
        "/moved": (302, {"Location": "/a.png"}, b""),
        "/loop": (302, {"Location": "/loop"}, b""),
        "/to-file": (302, {"Location": "file:///etc/passwd"}, b""),
        "/to-ftp": (302, {"Location": "ftp://example.org/a.png"}, b""),
        "/to-private": (302, {"Location": "http://10.0.0.1/a.png"}, b""),
    }

    def do_GET(self) -> None:
        status, headers, body = self.pages.get(self.path, (404, {}, b""))
        self.send_response(status)
        for header in headers.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Silence."""


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture
def open_server(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    return server


def test_urls_are_off_by_default() -> None:
    with pytest.raises(MediaError, match="pass allow_urls=True"):
        load_image("https://example.org/a.png")


def test_a_url_is_fetched_through_redirects(open_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # Nothing listens there: proxies are not used.
    for page in ("/a.png", "/moved"):
        assert np.array_equal(np.asarray(load_image(open_server + page, allow_urls=True)), PIXELS)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("/absent", "answers 404"),
        ("/liar", r"ended after \d+ of 5,000 bytes"),
        ("/endless", "larger than the 50,000 bytes"),
        ("/loop", "302"),
        ("/to-file", "not allowed"),
        ("/to-ftp", "only http and https"),
        ("/to-private", "10.0.0.1, not a public address"),
        ("/a b", "cannot be fetched"),
    ],
)
def test_a_bad_answer_is_a_media_error(
    open_server: str, monkeypatch: pytest.MonkeyPatch, page: str, reason: str
) -> None:
    monkeypatch.setattr(media, "MAX_IMAGE_BYTES", 50_000)
    with pytest.raises(MediaError, match=reason):
        load_image(open_server + page, allow_urls=True)


def test_the_server_of_this_machine_is_refused(server: str) -> None:
    port = server.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]"):
        with pytest.raises(MediaError, match=r"not a public address|cannot be fetched"):
            load_image(f"http://{host}:{port}/a.png", allow_urls=True)


@pytest.mark.parametrize("url", ["ftp://example.org/a.png", "file:///etc/passwd", "http://me:pw@example.org/a.png"])
def test_other_schemes_and_credentials_are_refused(url: str) -> None:
    with pytest.raises(MediaError, match=r"only http and https|user name or password") as caught:
        load_image(url, allow_urls=True)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
    ],
)
def test_only_public_addresses_are_public(address: str, public: bool) -> None:
    assert fetch.is_public(address) is public
