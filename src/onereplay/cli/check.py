"""`onereplay check`: an adapter against plain transformers on this machine."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from onereplay.cli.options import DeviceFlag, Dtype, DtypeFlag, JsonFlag, Model, SeedFlag, torch_device, torch_dtype
from onereplay.cli.printing import console, print_json, print_line, print_table
from onereplay.config import load_config

if TYPE_CHECKING:
    from onereplay.checking import CheckResult


def check(
    model: Model,
    backend: Annotated[str | None, typer.Option("--backend", metavar="NAME", help="auto, cuda or traced.")] = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    seed: SeedFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare a model with plain transformers.

    The same weights run under graphs, eagerly and in plain transformers. Exit code 0: every claim holds; 1: one fails.
    """
    chosen = load_config(flags={"backend": backend}).backend
    results = _check(model, chosen, device, dtype, seed or 0)
    passed = bool(results) and all(result.passed for result in results)
    if as_json:
        print_json({"model": model, "passed": passed, "claims": [dataclasses.asdict(result) for result in results]})
    else:
        print_table(
            ("", "claim", "detail"),
            [("pass" if result.passed else "FAIL", result.claim, result.detail) for result in results],
        )
        print_line(f"{sum(result.passed for result in results)} of {len(results)} claims hold")
    raise typer.Exit(0 if passed else 1)


def _check(model: str, backend: str, device: str | None, dtype: Dtype | None, seed: int) -> "list[CheckResult]":
    from onereplay.checking import check_model

    where = console(stderr=True)
    with where.status("checking") as status:  # Shown on a terminal only.
        return check_model(
            model,
            backend=backend,
            device=device and str(torch_device(device)),
            dtype=torch_dtype(dtype),
            seed=seed,
            progress=status.update,
        )
