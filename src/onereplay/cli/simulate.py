"""`onereplay simulate`: what a cap and a grid of budgets are worth, from measured times or for a GPU on paper."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onereplay.cli.options import JsonFlag, among, positive_integers
from onereplay.cli.printing import console, print_json, print_line, print_table
from onereplay.errors import ConfigError

if TYPE_CHECKING:
    from onereplay.bench.analytic import Gpu
    from onereplay.bench.profile import Profile
    from onereplay.bench.simulate import Study


def simulate(
    profiles: Annotated[
        list[Path] | None, typer.Argument(metavar="PROFILES", help="JSON files of `bench --profile`, one a model.")
    ] = None,
    grid: Annotated[
        str, typer.Option(help="36 (the default grid) and 49 (steps of 128 to the cap), named by levels at 5120.")
    ] = "36,49",
    cap: Annotated[str | None, typer.Option(metavar="N,N,...", help="Caps; 1024 to 16384 by default.")] = None,
    budgets: Annotated[str | None, typer.Option(metavar="N,N,...", help="A list of your own as one more grid.")] = None,
    workload: Annotated[str, typer.Option(help="mix-v1, mix-log, cases or videos.")] = "mix-v1",
    batches: Annotated[int | None, typer.Option(min=1, help="The first N batches; all by default.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=N,...",
            help="Without measurements: tflops, tb_s, launch_us, kernel_us; "
            "with profiles, predictions are shown beside them.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="preset:NAME,...", help="Presets to compute for the GPU of --gpu.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A directory for JSON and page.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="A PNG file too; needs matplotlib.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare caps and grids of budgets with earlier rules, and recommend the smallest cap that slows no batch.

    From measured times, or from a model of a GPU that you do not have. Runs nothing on a device.
    """
    from onereplay.bench.analytic import Gpu, analytic_profile, compared
    from onereplay.bench.grids import GRIDS
    from onereplay.bench.profile import read_profile
    from onereplay.bench.simulate import simulate as study_of

    grids = among("grid", grid, tuple(GRIDS))
    caps = positive_integers("cap", cap) if cap else None
    own = positive_integers("budgets", budgets) if budgets else None
    device = Gpu.parse(gpu) if gpu is not None else None
    names = [name.strip() for name in model.split(",")] if model else []
    _check(names, device, profiles or [])
    if plot and out is None:
        raise ConfigError("--plot writes a file; give --out DIR too")
    measured = [read_profile(path) for path in profiles or []]
    where = console(stderr=True)
    predicted: list[Profile] = []
    for name in names if device else []:
        where.print(f"computing {name}")
        predicted.append(analytic_profile(name, device))  # type: ignore[arg-type]
    study = study_of(
        [*measured, *predicted],
        grids=grids,
        caps=caps,
        budgets=own,
        name=workload,
        limit=batches,
        command=" ".join(["onereplay", *sys.argv[1:]]),
    )
    if device:
        beside = [(each.model, tuple(compared(each, analytic_profile(each.model, device)))) for each in measured]
        study = dataclasses.replace(study, compared=tuple(beside))
    if as_json:
        print_json(dataclasses.asdict(study))
    else:
        _print(study)
    if out is not None:
        _write(study, out, plot)


def _check(names: list[str], device: "Gpu | None", profiles: list[Path]) -> None:
    if names and device is None:
        raise ConfigError(f"model={','.join(names)} needs a GPU to compute for; give --gpu tflops=...,tb_s=...")
    if not names and not profiles:
        raise ConfigError("nothing to simulate; give profiles of `bench --profile`, or --gpu and --model")


def _print(study: "Study") -> None:
    from onereplay.bench.study_page import COMPARED, HEADER, cells, compared_cells, in_short, recommendations

    print_table(HEADER, [cells(outcome) for outcome in study.overall], numbers=HEADER[1:])
    print_line()
    print_line(
        f"{study.workload}, {study.batches:,} batches, {len(study.models)} models; ratios are earlier over ours."
    )
    for sentence in (*recommendations(study), *study.notes):
        print_line(sentence)
    for model, rows in study.compared:
        print_line()
        print_line(f"{model}, milliseconds")
        print_table(COMPARED, [compared_cells(one) for one in rows], numbers=COMPARED[1:])
        print_line(in_short(rows))


def _write(study: "Study", out: Path, plot: bool) -> None:
    import datetime

    from onereplay.bench.report import write
    from onereplay.bench.study_page import study_page, study_plot

    stem = f"simulate_{study.workload}_{datetime.datetime.now(tz=datetime.UTC).date().isoformat()}"
    paths = write(out, stem, dataclasses.asdict(study), study_page(study))
    where = console(stderr=True)
    for path in [*paths, *([study_plot(study, out, stem)] if plot else [])]:
        where.print(f"wrote {path}")
