"""The `onereplay` command: one file a command, each parses, calls the library and prints.

torch and transformers are imported inside the commands, so that `onereplay --help` answers at once. Exit codes:
0 all went well, 1 some inputs or claims failed, 2 an option or the model was refused, 130 interrupted.
"""

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onereplay import __version__
from onereplay.cli.bench import bench
from onereplay.cli.budgets import budgets
from onereplay.cli.check import check
from onereplay.cli.encode import encode
from onereplay.cli.models import models
from onereplay.cli.plan import plan
from onereplay.cli.simulate import simulate
from onereplay.errors import OnereplayError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


class Commands(TyperGroup):
    """Turns the library's own errors into one line; any other exception is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except OnereplayError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(EXIT_REFUSED) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from error


app = typer.Typer(
    name="onereplay",
    cls=Commands,
    help="Vision encoders under CUDA graphs: a batch is one replay or one eager forward.",
    epilog="MODEL is a hub id, a local directory, preset:NAME or preset:NAME@tiny; see `onereplay models`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (encode, plan, budgets, models, check, bench, simulate):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"onereplay {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of the `onereplay` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A name that the terminal cannot show must not end a run.
    app(prog_name="onereplay")
