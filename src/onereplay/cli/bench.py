"""`onereplay bench`: the ways to encode a batch, side by side on this machine."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from onereplay.cli.options import DeviceFlag, DtypeFlag, JsonFlag, Model, takes_config, torch_device, torch_dtype
from onereplay.cli.printing import console, print_json, print_line
from onereplay.config import EncoderCudaGraphConfig
from onereplay.errors import ConfigError


@takes_config
def bench(
    model: Model,
    config: EncoderCudaGraphConfig,
    workload: Annotated[str, typer.Option(help="single, cases, mix-v1, mix-log, videos; several with commas.")] = "single",
    ways: Annotated[
        str,
        typer.Option(
            help="plain, varlen, compile, reduce-overhead, eager, replay, half-octave, power-of-two; with commas."
        ),
    ] = "plain,eager,replay",
    tokens: Annotated[str | None, typer.Option(metavar="N,N,...", help="Tokens of the batches of single.")] = None,
    batches: Annotated[int, typer.Option(min=1, help="The first N batches of each other workload.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Counted calls of a batch of single, at most.")] = 50,
    seconds: Annotated[float, typer.Option(help="Time of the counted calls of one way and batch, at most.")] = 0.5,
    out: Annotated[Path | None, typer.Option(help="A directory for JSON, page and plots.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="PNG files too; needs matplotlib.")] = False,
    commit: Annotated[str | None, typer.Option(help="What the card names, for sources without git.")] = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure plain transformers, an eager forward, and one replay, on the same weights and pixels in one process."""
    from onereplay.bench.inputs import WORKLOADS
    from onereplay.bench.page import page, plots
    from onereplay.bench.report import stem, write
    from onereplay.bench.run import TOKENS, Options, run
    from onereplay.bench.ways import WAYS

    options = Options(
        model=model,
        workloads=_among("workload", workload, WORKLOADS),
        ways=tuple(dict.fromkeys((*_among("ways", ways, WAYS), "replay"))),
        tokens=_integers(tokens) if tokens else TOKENS,
        batches=batches,
        repeats=repeats,
        seconds=seconds,
        device=device and str(torch_device(device)),
        dtype=torch_dtype(dtype),
        config=config,
        commit=commit,
    )
    where = console(stderr=True)
    result = run(options, " ".join(["onereplay", *sys.argv[1:]]), progress=where.print)
    text = page(result)
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        print_line(text)
    if out is not None:
        name = stem(f"bench_{model.removeprefix('preset:').replace('/', '--')}", result.card)
        paths = write(out, name, dataclasses.asdict(result), text)
        for path in [*paths, *(plots(result, out, name) if plot else [])]:
            where.print(f"wrote {path}")


def _among(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        raise ConfigError(f"{option}={text!r} has {', '.join(unknown) or 'no name'}; use {', '.join(allowed)}")
    return names


def _integers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"tokens={text!r}; give positive integers with commas, such as 64,1024,5120")
    return found
