"""Flags that several commands share, and how their text becomes options of the library."""

import enum
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onereplay.config import EncoderCudaGraphConfig, load_config
from onereplay.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from onereplay.encoder import VideoOptions

MODEL_HELP = "A hub id, a local directory, preset:NAME or preset:NAME@tiny (random weights)."


class Dtype(enum.StrEnum):
    """Types that weights and features can have."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
DeviceFlag = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N; CUDA if there is any.")]
DtypeFlag = Annotated[
    Dtype | None, typer.Option("--dtype", help="Of weights and features; bfloat16 on CUDA, float32 elsewhere.")
]
SeedFlag = Annotated[int | None, typer.Option("--seed", help="Of a preset's random weights; 0 by default.")]
RevisionFlag = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.")]
FpsFlag = Annotated[
    str, typer.Option("--fps", metavar="RATE|none", help="Frames taken of a video, a second; none takes every frame.")
]
MaxFramesFlag = Annotated[int | None, typer.Option("--max-frames", help="The most frames taken of a video.")]
LimitFlag = Annotated[int | None, typer.Option("--limit", min=1, help="Take the first N inputs only.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_CONFIG_FLAGS: Mapping[str, tuple[str, str]] = {
    "max_token_budget": ("N|none", "The largest captured budget, in tokens; 5120 by default, none is the model's own."),
    "token_budgets": ("N,N,...", "Budgets in place of the grid that `onereplay budgets` prints."),
    "max_items_per_batch": ("N", "A bound on the whole batch, 64 by default; a batch with more items runs eagerly."),
    "max_frames_per_batch": ("N", "Frames that a captured graph has room for; as many as items by default."),
    "attention": ("NAME", "auto, short, fa2, fa4 or reference."),
    "backend": ("NAME", "auto, cuda or traced."),
    "optimize": ("NAME,...", "Exact rewrites by name; auto is all under CUDA graphs and none elsewhere."),
    "features": ("NAME", "Of a tower that embeds images: embedding (auto) or rows."),
    "tile_size": ("SIDE|HxW", "Pixels that graphs are captured for, for towers that take any size."),
}
"""By option: how its value is written in help, and the help."""


def takes_config(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of `EncoderCudaGraphConfig` as a flag, and `--config`.

    Flags stay text until `load_config` reads them, so a bad value has one message from every entry point. The command
    gets the result as `config`, before any of it runs.
    """
    signature = inspect.signature(command)
    own = [parameter for name, parameter in signature.parameters.items() if name != "config"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *_config_parameters())]

    @functools.wraps(command)
    def with_config(*, config_file: str | None, **given: Any) -> None:
        flags = {name: given.pop(name) for name in EncoderCudaGraphConfig.option_names()}
        command(**given, config=load_config(file=config_file, flags=flags))

    with_config.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_config.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_config


def _config_parameters() -> list[inspect.Parameter]:
    flags = {
        name: (f"--{name.replace('_', '-')}", *_CONFIG_FLAGS[name]) for name in EncoderCudaGraphConfig.option_names()
    }
    flags["config_file"] = ("--config", "FILE", "A .toml or .json file of these options; flags override it.")
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(flag, metavar=metavar, help=text)],
        )
        for name, (flag, metavar, text) in flags.items()
    ]


def loading_options(
    spec: str, *, device: str | None, dtype: Dtype | None, seed: int | None, revision: str | None
) -> dict[str, Any]:
    """Keywords of `Encoder.from_spec` for this kind of model.

    Raises:
        ConfigError: the device is unknown or absent, or an option is of the other kind of model.
    """
    options: dict[str, Any] = {"device": torch_device(device), "dtype": torch_dtype(dtype)}
    if is_preset(spec):
        refuse_revision(spec, revision)
        return {**options, "seed": seed or 0}
    if seed is not None:
        raise ConfigError(f"seed={seed} is for random weights and {spec} is a checkpoint; leave --seed out")
    return {**options, "revision": revision}


def is_preset(spec: str) -> bool:
    """Whether the model is a published configuration with random weights."""
    from onereplay.presets import PREFIX

    return spec.startswith(PREFIX)


def refuse_revision(spec: str, revision: str | None) -> None:
    """A preset has no revisions.

    Raises:
        ConfigError: one is given.
    """
    if revision is not None and is_preset(spec):
        raise ConfigError(f"revision={revision!r} is for a hub id and {spec} is a preset; leave --revision out")


def torch_device(text: str | None) -> "torch.device | None":
    """The device that text names.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    if text is None:
        return None
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(f"device={text!r} is unknown; give cpu, cuda or cuda:N") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"device={text!r} is not there, torch sees {count} CUDA devices; give another, or cpu")
    return device


def torch_dtype(dtype: Dtype | None) -> "torch.dtype | None":
    """The same as torch spells it."""
    import torch

    return (
        None
        if dtype is None
        else {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}[dtype]
    )


def video_options(fps: str, max_frames: int | None) -> "VideoOptions":
    """How videos are sampled.

    Raises:
        ConfigError: a value is refused, also when no input is a video.
    """
    rate = _rate(fps)
    if max_frames is not None and max_frames < 1:
        raise ConfigError(f"max_frames is {max_frames}; give a whole number of at least 1, or None for no bound")
    from onereplay.encoder import VideoOptions

    return VideoOptions(rate, max_frames)


def _rate(text: str) -> float | None:
    if text.strip().lower() == "none":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigError(f"fps is {text}; give a positive number of frames per second, or None for every frame")
    return rate


def among(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Names with commas, each once.

    Raises:
        ConfigError: one is not allowed, or there is none.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        raise ConfigError(f"{option}={text!r} has {', '.join(unknown) or 'no name'}; use {', '.join(allowed)}")
    return names


def positive_integers(option: str, text: str) -> tuple[int, ...]:
    """Integers with commas.

    Raises:
        ConfigError: one is none, or is not positive.
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"{option}={text!r}; give positive integers with commas, such as 64,1024,5120")
    return found
