"""`onereplay plan`: what would be replayed and what would run eagerly, without weights and without running."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onereplay.cli.batches import padding_of, steps_json, steps_text
from onereplay.cli.inputs import Input, resolve_inputs
from onereplay.cli.options import (
    FpsFlag,
    JsonFlag,
    LimitFlag,
    MaxFramesFlag,
    Model,
    RevisionFlag,
    refuse_revision,
    takes_config,
    video_options,
)
from onereplay.cli.printing import print_failure, print_json, print_line, print_table, progress, reason
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.items import Item
from onereplay.core.plan import Capacity, Plan
from onereplay.core.plan import batches as batches_of
from onereplay.core.plan import plan as plan_batch
from onereplay.errors import MissingDependencyError, OnereplayError

if TYPE_CHECKING:
    from onereplay.encoder import Preprocessor, VideoOptions


@dataclass(frozen=True)
class _Row:
    """One input: the item that it would be, or why it would be none."""

    number: int
    input: Input
    size: str | None = None
    item: Item | None = None
    error: OnereplayError | None = None

    @property
    def sequences(self) -> int | None:
        return None if self.item is None else sum(size.sequences for size in self.item.sizes.values())

    def cells(self) -> Sequence[object]:
        """One row of the table."""
        tokens = None if self.item is None else self.item.num_tokens
        failed = f"failed: {reason(self.error)}" if self.error else None
        return self.number, self.input.shown, self.size or failed, tokens, self.sequences

    def to_json(self) -> dict[str, Any]:
        """One entry of the list of items."""
        return {
            "path": self.input.path,
            "modality": self.item and self.item.modality.value,
            "size": self.size,
            "tokens": self.item and self.item.num_tokens,
            "sequences": self.sequences,
            "error": self.error and reason(self.error),
        }


@dataclass(frozen=True)
class _Batch:
    """Rows that run together, and how."""

    rows: Sequence[_Row]
    plan: Plan

    @property
    def tokens(self) -> int:
        return sum(row.item.num_tokens for row in self.rows if row.item)

    def cells(self) -> Sequence[object]:
        """One row of the table."""
        first, last = self.rows[0].number, self.rows[-1].number
        span = f"#{first}" if first == last else f"#{first} to #{last}"
        padding, _ = padding_of(self.plan)
        return span, len(self.rows), self.tokens, padding, steps_text(self.plan, details=True)

    def to_json(self) -> dict[str, Any]:
        """`items` are places in the list of items."""
        places = [row.number - 1 for row in self.rows]
        return {"items": places, "tokens": self.tokens, "steps": steps_json(self.plan)}


@takes_config
def plan(
    model: Model,
    files: Annotated[list[str], typer.Argument(metavar="FILES", help="Files, directories and glob patterns.")],
    config: EncoderCudaGraphConfig,
    one_batch: Annotated[bool, typer.Option("--one-batch", help="Plan all files as one batch.")] = False,
    fps: FpsFlag = "2",
    max_frames: MaxFramesFlag = None,
    limit: LimitFlag = None,
    revision: RevisionFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what would be replayed, and what not.

    Runs nothing and loads no weights. Of a file the header is read, so one that is broken further on goes unnoticed.
    """
    video = video_options(fps, max_frames)
    refuse_revision(model, revision)
    inputs = resolve_inputs(files, limit=limit)
    from onereplay.encoder import planner

    preprocessor, capacities = planner(model, config, revision)
    rows = list(progress(_rows(preprocessor, inputs, video), len(inputs), "reading", quiet=as_json))
    good = [row for row in rows if row.item]
    groups = [good] * bool(good) if one_batch else _groups(rows, capacities)
    batches = [_Batch(group, plan_batch([row.item for row in group if row.item], capacities)) for group in groups]
    if as_json:
        _print_json(model, rows, batches)
    else:
        _print(rows, batches)
    raise typer.Exit(0 if len(good) == len(rows) else 1)


def _groups(rows: Sequence[_Row], capacities: Mapping[str, Sequence[Capacity]]) -> list[list[_Row]]:
    """What `encode` would run together."""
    good = [row for row in rows if row.item]
    return list(batches_of(good, lambda row: row.item, lambda: capacities))


def _rows(preprocessor: "Preprocessor", inputs: Sequence[Input], video: "VideoOptions") -> Iterator[_Row]:
    for number, entry in enumerate(inputs, start=1):
        try:
            if entry.error:
                raise entry.error
            item, size = preprocessor.item(entry.source, video)
            yield _Row(number, entry, size, item)
        except MissingDependencyError:
            raise
        except OnereplayError as error:
            print_failure(entry.shown, error)
            yield _Row(number, entry, error=error)


def _print(rows: Sequence[_Row], batches: Sequence[_Batch]) -> None:
    numbers = ("#", "tokens", "sequences", "items", "padding")
    print_table(("#", "name", "size", "tokens", "sequences"), [row.cells() for row in rows], numbers=numbers)
    print_line()
    headers = ("batch", "items", "tokens", "padding", "runs")
    print_table(headers, [batch.cells() for batch in batches], numbers=numbers)
    print_line()
    print_line(
        "{items:,} items, {failed:,} failed; {tokens:,} tokens in {batches:,} batches: {replayed_batches:,} replayed, "
        "{eager_batches:,} eager; {padding_fraction:.1%} padding".format(**_totals(rows, batches))
    )


def _print_json(model: str, rows: Sequence[_Row], batches: Sequence[_Batch]) -> None:
    items, listed = [row.to_json() for row in rows], [batch.to_json() for batch in batches]
    print_json({"model": model, "items": items, "batches": listed, "totals": _totals(rows, batches)})


def _totals(rows: Sequence[_Row], batches: Sequence[_Batch]) -> dict[str, Any]:
    """Counts; `padding_fraction` is the share of replayed rows, as in an encoder's report."""
    paddings = [padding_of(batch.plan) for batch in batches]
    padding, replayed = (sum(column) for column in zip((0, 0), *paddings, strict=True))
    return {
        "items": sum(len(batch.rows) for batch in batches),
        "failed": sum(row.error is not None for row in rows),
        "tokens": sum(batch.tokens for batch in batches),
        "batches": len(batches),
        "replayed_batches": sum(batch.plan.all_replayed for batch in batches),
        "eager_batches": sum(not batch.plan.all_replayed for batch in batches),
        "padding_tokens": padding,
        "padding_fraction": padding / replayed if replayed else 0.0,
    }
