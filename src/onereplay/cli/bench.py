"""`onereplay bench`: the ways to encode a batch, side by side on this machine."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from onereplay.cli.options import (
    DeviceFlag,
    Dtype,
    DtypeFlag,
    JsonFlag,
    Model,
    among,
    positive_integers,
    takes_config,
    torch_device,
    torch_dtype,
)
from onereplay.cli.printing import console, print_json, print_line
from onereplay.config import EncoderCudaGraphConfig
from onereplay.errors import ConfigError

SINGLE, WAYS, BATCHES, REPEATS = "single", "plain,eager,replay", 200, 50
"""Defaults of flags that `--profile` does not take."""


@takes_config
def bench(
    model: Model,
    config: EncoderCudaGraphConfig,
    workload: Annotated[
        str, typer.Option(help="single, cases, mix-v1, mix-log, videos; several with commas.")
    ] = SINGLE,
    ways: Annotated[
        str,
        typer.Option(
            help="plain, varlen, compile, reduce-overhead, eager, replay, half-octave, power-of-two; with commas."
        ),
    ] = WAYS,
    tokens: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Tokens of the batches of single, or counts of a profile.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="The first N batches of each other workload.")] = BATCHES,
    repeats: Annotated[int, typer.Option(min=1, help="Counted calls of a batch of single, at most.")] = REPEATS,
    seconds: Annotated[
        float | None,
        typer.Option(help="Time of the counted calls of one way and batch, at most; 0.5, and 0.05 of a profile."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Times of replay and eager at every level, for `onereplay simulate`.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A directory for JSON, page and plots.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="PNG files too; needs matplotlib.")] = False,
    commit: Annotated[str | None, typer.Option(help="What the card names, for sources without git.")] = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure plain transformers, an eager forward, and one replay, on the same weights and pixels in one process."""
    command, where = " ".join(["onereplay", *sys.argv[1:]]), console(stderr=True)
    counts = positive_integers("tokens", tokens) if tokens else None
    if profile:
        given = {"workload": workload != SINGLE, "ways": ways != WAYS, "batches": batches != BATCHES}
        given |= {"repeats": repeats != REPEATS, "plot": plot}
        if refused := [f"--{name}" for name, differs in given.items() if differs]:
            raise ConfigError(f"--profile has its own batches; leave {', '.join(refused)} out")
        _profile(model, config, counts, seconds, out, commit, device, dtype, command, as_json)
        return
    from onereplay.bench.inputs import WORKLOADS
    from onereplay.bench.page import page, plots
    from onereplay.bench.report import stem, write
    from onereplay.bench.run import TOKENS, Options, run
    from onereplay.bench.ways import WAYS as ALL_WAYS

    options = Options(
        model=model,
        workloads=among("workload", workload, WORKLOADS),
        ways=tuple(dict.fromkeys((*among("ways", ways, ALL_WAYS), "replay"))),
        tokens=counts or TOKENS,
        batches=batches,
        repeats=repeats,
        seconds=0.5 if seconds is None else seconds,
        device=device and str(torch_device(device)),
        dtype=torch_dtype(dtype),
        config=config,
        commit=commit,
    )
    result = run(options, command, progress=where.print)
    text = page(result)
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        print_line(text)
    if out is not None:
        name = stem(f"bench_{_slug(model)}", result.card)
        paths = write(out, name, dataclasses.asdict(result), text)
        for path in [*paths, *(plots(result, out, name) if plot else [])]:
            where.print(f"wrote {path}")


def _profile(
    model: str,
    config: EncoderCudaGraphConfig,
    counts: tuple[int, ...] | None,
    seconds: float | None,
    out: Path | None,
    commit: str | None,
    device: str | None,
    dtype: Dtype | None,
    command: str,
    as_json: bool,
) -> None:
    from onereplay.bench.profile import SECONDS, measure_profile, profile_page
    from onereplay.bench.report import stem, write

    where = console(stderr=True)
    found = measure_profile(
        model,
        config,
        tokens=counts,
        device=device and str(torch_device(device)),
        dtype=torch_dtype(dtype),
        seconds=SECONDS if seconds is None else seconds,
        command=command,
        commit=commit,
        progress=where.print,
    )
    if as_json:
        print_json(found.to_json())
    else:
        print_line(profile_page(found))
    if out is not None and found.card is not None:
        for path in write(out, stem(f"profile_{_slug(model)}", found.card), found.to_json(), profile_page(found)):
            where.print(f"wrote {path}")


def _slug(model: str) -> str:
    """A model's name in the name of a file."""
    return model.removeprefix("preset:").replace("/", "--")
