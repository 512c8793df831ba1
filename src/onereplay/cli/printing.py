"""Tables, JSON and progress. Results go to standard output, everything else to standard error."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from onereplay.errors import MediaError, OnereplayError

T = TypeVar("T")
_UNBOUNDED = 10_000
"""Characters: without a terminal a table takes the width that it needs, one line a row."""


def console(*, stderr: bool = False) -> Console:
    """Where to print; names of files are shown as they are, never read as markup."""
    made = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not made.is_terminal:
        made.width = _UNBOUNDED
    return made


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Aligned columns; those in `numbers` to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, justify="right" if header in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    where = console()
    if where.is_terminal:
        where.print(table)
        return
    with where.capture() as text:
        where.print(table)
    for line in text.get().splitlines():
        typer.echo(line.rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_line(text: str = "") -> None:
    """One line of a result, not wrapped."""
    console().print(text, soft_wrap=True)


def print_json(value: Any) -> None:
    """A result for scripts."""
    typer.echo(json.dumps(value, indent=2))


def print_failure(name: str, error: OnereplayError) -> None:
    """One input that gave nothing, on standard error.

    By `print`, which a progress bar redirects above itself; a second console would write through the bar.
    """
    print(f"failed: {name}: {reason(error)}", file=sys.stderr)


def reason(error: OnereplayError) -> str:
    """Why an input gave nothing, without its name, on one line."""
    return " ".join((error.reason if isinstance(error, MediaError) else str(error)).split())


def progress(entries: Iterable[T], total: int, title: str, *, quiet: bool = False) -> Iterator[T]:
    """The entries, with a bar on standard error where that is a terminal."""
    where = console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=where, transient=True, disable=quiet or not where.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        for entry in entries:
            yield entry
            bar.advance(task)
