"""The encoder of a vision-language model, from files to features. The file to read first.

    source ─► decode ─► image processor ─► adapter.batch ─► manager.encode ─► one tensor an item

`Preprocessor` is the left half and needs no weights; `Encoder` owns both halves.
"""

import functools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor

from onereplay import loading, media, preprocess, presets
from onereplay.adapters import adapter_class, adapter_for
from onereplay.adapters.base import Adapter
from onereplay.attention import resolve_backend
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.budgets import positive
from onereplay.core.graphs import backend_name
from onereplay.core.items import Item, Modality
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Capacity, Plan, batches
from onereplay.core.stats import Report
from onereplay.errors import ConfigError, InputError, OnereplayError
from onereplay.optimize import choose

logger = logging.getLogger(__name__)

Source = Any
"""An image or a video: a path, bytes, a file object, a data URI, a PIL image, an array, a `media.Video`."""


@dataclass(frozen=True)
class VideoOptions:
    """How videos are sampled."""

    fps: float | None = 2.0
    """Frames taken a second; `None` takes every frame."""
    max_frames: int | None = None

    def __post_init__(self) -> None:
        if self.fps is not None and not self.fps > 0:
            raise ConfigError(f"fps={self.fps!r} is not positive; give frames a second, or None for every frame")
        if self.max_frames is not None:
            positive("max_frames", self.max_frames)


@dataclass(frozen=True)
class Encoded:
    """One item of `Encoder.encode_each`: its features, or the error that kept it from having any."""

    index: int
    """Its place among the sources."""
    source: str
    """The source, shortened for print."""
    features: Tensor | None = None
    """`(tokens, hidden)`, the caller's own."""
    error: OnereplayError | None = None
    item: Item | None = None
    plan: Plan | None = None
    """What its whole batch did."""
    batch_size: int = 0
    batch_seconds: float = 0.0
    """Wall time of its whole batch, from packing until the features are there; decoding is not in it."""


class Preprocessor:
    """From sources to an adapter's batch. Needs the model's configuration and image processor, no weights.

    Args:
        adapter: the model's adapter, with or without modules.
        processor: an image processor of transformers, or where to load one from (a directory, a hub id, a mapping as in
            `preprocessor_config.json`); loaded when first needed.
        revision: of the hub repository.
    """

    def __init__(self, adapter: Adapter[Any], processor: Any, revision: str | None = None) -> None:
        self.adapter = adapter
        self._given, self._revision = processor, revision

    @functools.cached_property
    def processor(self) -> Any:
        """The image processor of transformers.

        Raises:
            InputError: the encoder was made without one.
            MissingDependencyError: it needs torchvision, which is absent.
        """
        if self._given is None or isinstance(self._given, str | os.PathLike | Mapping):
            own = preprocess.own_processor(self.adapter.model_type, self.adapter.config, self._given)
            if own is not None:
                return own
        if self._given is None:
            raise InputError(
                "this encoder has no image processor; give Encoder(model, processor=...) one, or preprocess yourself "
                "and call encode_inputs"
            )
        if isinstance(self._given, str | os.PathLike | Mapping):
            options = {"revision": self._revision} if self._revision else {}
            return preprocess.load_image_processor(self._given, **options)  # type: ignore[arg-type]
        return getattr(self._given, "image_processor", self._given)

    def batch(self, source: Source, video: VideoOptions | None = None, *, allow_urls: bool = False) -> Any:
        """A batch of one item.

        Raises:
            MediaError: the source cannot be read.
            InputError: the model does not take it.
        """
        model_type = self.adapter.model_type
        if self._classify(source) == "image":
            image = media.load_image(source, allow_urls=allow_urls)
            return self.adapter.batch(**preprocess.preprocess_images(self.processor, model_type, [image]))
        video = video or VideoOptions()
        clip = media.load_video(source, fps=video.fps, max_frames=video.max_frames, allow_urls=allow_urls)
        return self.adapter.batch(**preprocess.preprocess_video(self.processor, model_type, clip))

    def _classify(self, source: Source) -> str:
        """Tell an image from a video; recordings are not read here."""
        modalities, reason = self.adapter.modalities, ""
        if modalities != (Modality.AUDIO,):
            try:
                return media.classify(source)
            except InputError as error:
                if Modality.AUDIO not in modalities:
                    raise
                reason = f"{error}; "
        raise InputError(
            f"{reason}{self.adapter.model_type} takes recordings, and files of audio are not read here: load the "
            f"samples yourself, call the model's feature extractor, and give encode_inputs its input_features"
        )

    def item(self, source: Source, video: VideoOptions | None = None) -> tuple[Item, str]:
        """The item that a source would be, and its size for print. Reads headers; decodes at most one frame.

        Raises:
            MediaError, InputError: as `batch`.
        """
        if self._classify(source) == "image":
            width, height = media.image_size(source)
            frames, text = None, f"{width}x{height}"
        else:
            video = video or VideoOptions()
            size = media.video_size(source, fps=video.fps, max_frames=video.max_frames)
            width, height, frames = size.width, size.height, size.num_frames
            text = f"{width}x{height}, {frames} frames"
        sizes = preprocess.grid_of(self.processor, self.adapter.model_type, width, height, num_frames=frames)
        (item,) = self.adapter.items_of(**sizes)
        return item, text


class Encoder:
    """Runs a vision encoder by one rule: a batch is one replay of the smallest captured token budget that holds the
    whole of it, or one eager forward.

    Args:
        model: a loaded transformers model, with a head or without. It stays as it was and is used in place.
        config: what to capture; see `EncoderCudaGraphConfig`.
        processor: what turns images into pixels, for `encode`: an image processor or processor of transformers, or
            where to load one from. `encode_inputs` needs none.

    Raises:
        UnsupportedModelError: no adapter knows the model.
        ConfigError: the options do not fit the model or the device.

    Example::

        with Encoder.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct") as encoder:
            features = encoder.encode(["photo.jpg", "clip.mp4"])      # [(tokens, hidden), (tokens, hidden)]
            print(encoder.report())
    """

    def __init__(
        self,
        model: Any,
        config: EncoderCudaGraphConfig | None = None,
        *,
        processor: Any = None,
        revision: str | None = None,
    ) -> None:
        config = config or EncoderCudaGraphConfig()
        plain = adapter_for(model)
        check_options(plain, config, plain.device, plain.dtype)
        self.adapter = adapter_for(model, config)
        self.preprocessor = Preprocessor(self.adapter, processor, revision)
        self.manager: EncoderCudaGraphManager[Any] = EncoderCudaGraphManager(self.adapter, config)
        try:
            self.manager.capture()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_spec(cls, spec: str, **options: Any) -> Self:
        """From a hub id, a local directory, `preset:NAME` or `preset:NAME@tiny`; options as of the two below."""
        if spec.startswith(presets.PREFIX):
            return cls.from_preset(spec.removeprefix(presets.PREFIX), **options)
        return cls.from_pretrained(spec, **options)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        config: EncoderCudaGraphConfig | None = None,
        revision: str | None = None,
    ) -> Self:
        """Load the vision weights of a checkpoint, and nothing of its language model.

        Args:
            source: a local directory or a hub id with safetensors.
            device: where to; CUDA if there is any, else the CPU.
            dtype: bfloat16 on CUDA and float32 elsewhere by default.
            config: what to capture.
            revision: of the hub repository.

        Raises:
            CheckpointError: the checkpoint cannot be read, or misses, mis-shapes or mis-names a vision weight.
            UnsupportedModelError, ConfigError: as the class; raised before a weight is loaded.
        """
        config = config or EncoderCudaGraphConfig()
        model = _checkpoint_model(source, device, dtype, config, revision)
        return cls(model, config, processor=os.fspath(source), revision=revision)

    @classmethod
    def from_preset(
        cls,
        name: str,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        config: EncoderCudaGraphConfig | None = None,
        seed: int = 0,
    ) -> Self:
        """A published configuration with seeded random weights, for measuring and testing without a download.

        Args:
            name: a preset, see `onereplay models`; with `@tiny` a small one of the same structure.
            seed: of the weights; the same seed gives the same weights on the same kind of device.

        Raises:
            ConfigError: the preset is unknown.
        """
        config = config or EncoderCudaGraphConfig()
        model = _preset_model(name, device, dtype, config, seed)
        return cls(model, config, processor=presets.get_preset(name).processor)

    # ------------------------------------------------------------------ encode

    @overload
    def encode(
        self,
        sources: Sequence[Source],
        *,
        on_error: Literal["raise"] = "raise",
        video: VideoOptions | None = None,
        allow_urls: bool = False,
    ) -> list[Tensor]: ...

    @overload
    def encode(
        self,
        sources: Sequence[Source],
        *,
        on_error: Literal["return"],
        video: VideoOptions | None = None,
        allow_urls: bool = False,
    ) -> list[Tensor | OnereplayError]: ...

    def encode(
        self,
        sources: Sequence[Source],
        *,
        on_error: Literal["raise", "return"] = "raise",
        video: VideoOptions | None = None,
        allow_urls: bool = False,
    ) -> Sequence[Tensor | OnereplayError]:
        """Encode images and videos as one batch: one replay, or one eager forward.

        For more than a batch use `encode_each`, which makes batches that fit the captured budgets.

        Args:
            sources: a list; each entry an image or a video in any of the forms of `onereplay.media`.
            on_error: `raise` the first bad source's error, or `return` it in the source's place and encode the rest.
            video: how videos are sampled.
            allow_urls: fetch `http(s)` URLs.

        Returns:
            One tensor a source, in order: `(tokens, hidden)` in the model's dtype on its device, the caller's own.

        Raises:
            MediaError: a source cannot be read.
            InputError: the model does not take it; or `sources` is one source instead of a list.
            ClosedError: the encoder was closed.
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error={on_error!r} is unknown; use 'raise' or 'return'")
        read = [self._read(index, source, video, allow_urls) for index, source in enumerate(_listed(sources))]
        if on_error == "raise":
            for entry in read:
                if isinstance(entry, OnereplayError):
                    raise entry
        good = [entry for entry in read if not isinstance(entry, OnereplayError)]
        features = iter(self.manager.encode(self.adapter.join(good)) if good else [])
        return [entry if isinstance(entry, OnereplayError) else next(features) for entry in read]

    def encode_inputs(self, **inputs: Any) -> list[Tensor]:
        """Encode what the model's own processor returned, as one batch.

        Args:
            inputs: by the processor's names, `None` for absent:
                Qwen2.5-VL `pixel_values` and `image_grid_thw`, `pixel_values_videos` and `video_grid_thw`;
                InternVL `pixel_values`, and `num_patches` or `num_frames` to say which tiles belong together;
                LFM2-VL `pixel_values` and `spatial_shapes`, and `num_tiles`. Pixels may lie on the device already;
                grids should stay on the CPU, since reading them back waits for the device.

        Returns:
            One tensor an item: images in order, then videos.

        Raises:
            InputError: a name is unknown, or shapes do not fit together.
        """
        return self.manager.encode(self.adapter.batch(**inputs))

    def encode_each(
        self, sources: Iterable[Source], *, video: VideoOptions | None = None, allow_urls: bool = False
    ) -> Iterator[Encoded]:
        """Encode any number of sources, in order, in batches that fill the largest captured budget.

        A batch takes the next sources as long as it can be replayed; a source that no budget holds is a batch of its
        own and runs eagerly. A source that cannot be read yields its error, and the rest goes on.
        """
        if isinstance(sources, str | bytes | bytearray | memoryview | Path):
            raise InputError(f"encode_each takes images and videos, got {media.describe(sources)}; put it in a list")
        read = ((index, source, self._read(index, source, video, allow_urls)) for index, source in enumerate(sources))
        for group in batches(read, _item_of, lambda: self.manager.capacities):
            yield from self._encode_group(group)

    def _read(self, index: int, source: Source, video: VideoOptions | None, allow_urls: bool) -> Any | OnereplayError:
        """A batch of one item, or the error of the source. What fails every source (a missing package, no image
        processor) is raised: it is no `InputError`."""
        try:
            return self.preprocessor.batch(source, video, allow_urls=allow_urls)
        except InputError as error:
            error.add_note(f"source {index}: {media.describe(source)}")
            return error

    def _encode_group(self, group: Sequence[tuple[int, Source, Any]]) -> Iterator[Encoded]:
        """The entries of one batch, in order; errors among them ride along."""
        good = [entry for entry in group if not isinstance(entry[2], OnereplayError)]
        start = time.perf_counter()
        batch = self.adapter.join([entry for _, _, entry in good])
        steps = self.manager.plan(batch)
        features = iter(self.manager.encode(batch))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        seconds = time.perf_counter() - start
        for index, source, entry in group:
            name = media.describe(source)
            if isinstance(entry, OnereplayError):
                yield Encoded(index, name, error=entry)
            else:
                (item,) = entry.items
                yield Encoded(index, name, next(features), None, item, steps, len(good), seconds)

    # ------------------------------------------------------------------ about

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.manager.device

    @property
    def dtype(self) -> torch.dtype:
        """The features' type."""
        return self.manager.dtype

    def report(self) -> Report:
        """Replays, eager forwards by reason, padding and memory so far."""
        return self.manager.report()

    def close(self) -> None:
        """Give back graphs and buffers; the model is as it was. Calling again does nothing."""
        self.manager.close()
        self.adapter.rewritten.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def load_model(
    spec: str,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    config: EncoderCudaGraphConfig | None = None,
) -> Any:
    """The vision modules of a checkpoint or a preset as a stock base model, without an encoder on it.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError: as `Encoder.from_spec`.
    """
    config = config or EncoderCudaGraphConfig()
    if spec.startswith(presets.PREFIX):
        return _preset_model(spec.removeprefix(presets.PREFIX), device, dtype, config, seed=0)
    return _checkpoint_model(spec, device, dtype, config, None)


def _checkpoint_model(
    source: str | os.PathLike[str],
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    config: EncoderCudaGraphConfig,
    revision: str | None,
) -> Any:
    model_config = loading.load_config(source, revision=revision)
    found = adapter_class(model_config.model_type)
    device, dtype = _placement(device, dtype)
    check_options(found(model_config), config, device, dtype)
    with torch.inference_mode(False):
        return loading.load_vision_model(source, device=device, dtype=dtype, parts=found.parts, revision=revision)


def _preset_model(
    name: str,
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    config: EncoderCudaGraphConfig,
    seed: int,
) -> Any:
    preset = presets.get_preset(name)
    model_config = presets.hf_config(preset)
    found = adapter_class(preset.model_type)
    device, dtype = _placement(device, dtype)
    check_options(found(model_config), config, device, dtype)
    with torch.inference_mode(False):
        model = loading.vision_model(model_config, device=device, dtype=dtype, parts=found.parts)
        loading.random_weights_(model, found.parts, seed)
    return model


def planner(
    spec: str, config: EncoderCudaGraphConfig, revision: str | None = None
) -> tuple[Preprocessor, dict[str, Sequence[Capacity]]]:
    """What `onereplay plan` needs: a preprocessor and the capacities that would be captured. Loads no weights.

    Raises:
        ConfigError, CheckpointError, UnsupportedModelError: as `Encoder.from_spec`.
    """
    if spec.startswith(presets.PREFIX):
        preset = presets.get_preset(spec.removeprefix(presets.PREFIX))
        processor: Any
        model_config, processor = presets.hf_config(preset), preset.processor
    else:
        model_config, processor = loading.load_config(spec, revision=revision), spec
    adapter = adapter_class(model_config.model_type)(model_config)
    adapter.configure(config)
    capacities = {path: adapter.capacities(path, config) for path in adapter.paths()}
    return Preprocessor(adapter, processor, revision), capacities


def check_options(
    adapter: Adapter[Any], config: EncoderCudaGraphConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse options that do not fit the model or the device, before a weight is loaded.

    Raises:
        ConfigError: a cap below one item, a back end that the device does not have, or a dtype that it cannot take.
        MissingDependencyError: an attention back end that is not installed.
    """
    adapter.configure(config)
    for path in adapter.paths():
        adapter.capacities(path, config)
    backend_name(config.backend, device)
    resolve_backend(config.attention, device, 1)
    choose(config.optimize, device, config.backend)
    if device.type == "cuda" and dtype == torch.float32 and adapter.engine == "packed":
        raise ConfigError(
            f"dtype=float32: {adapter.model_type} runs variable-length attention, which FlashAttention has for float16 "
            f"and bfloat16 alone; use one of them, or device='cpu'"
        )


def _placement(device: str | torch.device | None, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is unknown to PyTorch; use cpu or cuda") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} is not supported; use cpu or cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but PyTorch finds no CUDA device; use cpu")
    return chosen, dtype or (torch.bfloat16 if chosen.type == "cuda" else torch.float32)


def _item_of(entry: tuple[int, Source, Any]) -> Item | None:
    return None if isinstance(entry[2], OnereplayError) else entry[2].items[0]


def _listed(sources: Sequence[Source]) -> Sequence[Source]:
    """The sources, if they are a list of them and not one."""
    if isinstance(sources, str | bytes | bytearray | memoryview | Path) or not isinstance(sources, Sequence):
        raise InputError(f"encode takes a list of images and videos, got {media.describe(sources)}; put it in a list")
    return sources
