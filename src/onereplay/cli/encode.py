"""`onereplay encode`: features of images and videos as safetensors."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onereplay import __version__
from onereplay.cli.batches import steps_json, steps_text
from onereplay.cli.inputs import Input, resolve_inputs, unique_names
from onereplay.cli.options import (
    MODEL_HELP,
    DeviceFlag,
    DtypeFlag,
    FpsFlag,
    JsonFlag,
    LimitFlag,
    MaxFramesFlag,
    RevisionFlag,
    SeedFlag,
    is_preset,
    loading_options,
    takes_config,
    video_options,
)
from onereplay.cli.output import Entry, Layout, OutputDirectory, Writer
from onereplay.cli.printing import print_failure, print_json, print_line, print_table, progress, reason
from onereplay.config import EncoderCudaGraphConfig
from onereplay.errors import OnereplayError

if TYPE_CHECKING:
    from onereplay.encoder import Encoded, Encoder, VideoOptions


@dataclass(frozen=True)
class _Done:
    """One row of the summary."""

    entry: Entry
    ran: str
    """In words."""
    batch_ms: float | None = None


@takes_config
def encode(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUTS", help="Files, directories, glob patterns; URLs if allowed.")
    ],
    model: Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP, show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The directory to write.", show_default=False)],
    config: EncoderCudaGraphConfig,
    layout: Annotated[
        Layout, typer.Option("--format", help="A file an input, or one file for all (held in memory until the end).")
    ] = Layout.PER_FILE,
    overwrite: Annotated[
        bool, typer.Option("--overwrite/--no-overwrite", help="Replace the files of an earlier run in the directory.")
    ] = False,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    seed: SeedFlag = None,
    revision: RevisionFlag = None,
    fps: FpsFlag = "2",
    max_frames: MaxFramesFlag = None,
    allow_urls: Annotated[bool, typer.Option("--allow-urls", help="Fetch http and https inputs.")] = False,
    limit: LimitFlag = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print failures only.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write features of images and videos.

    They go into safetensors files beside an index.json. A file that cannot be read is reported, and the rest goes on.
    Exit code 0: all went well; 1: some inputs failed; 2: an option or the model was refused.
    """
    video = video_options(fps, max_frames)
    given = resolve_inputs(inputs, allow_urls=allow_urls, limit=limit)
    names = unique_names([entry.source for entry in given])
    target = OutputDirectory(out, names, layout, overwrite=overwrite)
    options = loading_options(model, device=device, dtype=dtype, seed=seed, revision=revision)
    from onereplay.encoder import Encoder, planner

    _ = planner(model, config, revision)[0].processor  # Where this fails, every input would: before weights are loaded.
    target.make()
    with Encoder.from_spec(model, config=config, **options) as encoder:
        about = _about(model, encoder, layout, options, config)
        with target.run(about, _metadata(about)) as (writer, entries):
            done = []
            run = _Run(encoder, writer, _metadata(about), video, allow_urls)
            for row in progress(run.rows(given, names), len(given), "encoding", quiet=quiet or as_json):
                entries.append(row.entry)
                done.append(row)
        if as_json:
            _print_json(about, out, done, encoder)
        elif not quiet:
            _print_table(about, out, done, encoder)
    raise typer.Exit(1 if any(row.entry.error for row in done) else 0)


@dataclass(frozen=True)
class _Run:
    """Encodes inputs and writes what comes out."""

    encoder: "Encoder"
    writer: Writer
    metadata: Mapping[str, str]
    video: "VideoOptions"
    allow_urls: bool

    def rows(self, given: Sequence[Input], names: Sequence[str]) -> Iterator[_Done]:
        """One row an input, in order. What is no file is not given to the encoder, so it ends no batch."""
        readable = [entry.source for entry in given if not entry.error]
        encoded = self.encoder.encode_each(readable, video=self.video, allow_urls=self.allow_urls)
        for entry, name in zip(given, names, strict=True):
            if entry.error:
                yield _failed(entry, name, entry.error)
                continue
            result = next(encoded)
            yield _failed(entry, name, result.error) if result.error else self._written(entry, name, result)

    def _written(self, given: Input, name: str, result: "Encoded") -> _Done:
        assert result.features is not None
        assert result.item is not None
        assert result.plan is not None
        described: dict[str, Any] = {
            "modality": result.item.modality.value,
            "size": self._size(given),
            "tokens": result.item.num_tokens,
            "patches": sum(size.patches for size in result.item.sizes.values()),
            "hidden": result.features.shape[-1],
            "dtype": str(result.features.dtype).removeprefix("torch."),
        }
        header = {key: str(value) for key, value in described.items() if value is not None}
        file, key = self.writer.add(name, result.features, {**self.metadata, "source": given.path, **header})
        entry = Entry(name, given.path, file, key, **described, steps=steps_json(result.plan))
        return _Done(entry, steps_text(result.plan), result.batch_seconds * 1000)

    def _size(self, given: Input) -> str | None:
        """Pixels and frames, from the file's header. What came from the network is not fetched again for it."""
        try:
            return self.encoder.preprocessor.item(given.source, self.video)[1]
        except OnereplayError:
            return None


def _failed(given: Input, name: str, error: OnereplayError) -> _Done:
    print_failure(given.shown, error)
    return _Done(Entry(name, given.path, error=reason(error)), f"failed: {reason(error)}")


def _about(
    model: str, encoder: "Encoder", layout: Layout, options: Mapping[str, Any], config: EncoderCudaGraphConfig
) -> dict[str, Any]:
    """What the whole run shares; the head of the index."""
    return {
        "onereplay": __version__,
        "model": model,
        "model_type": encoder.adapter.model_type,
        "revision": options.get("revision"),
        "weights": f"random, seed {options['seed']}" if is_preset(model) else "checkpoint",
        "device": str(encoder.device),
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "format": layout.value,
        "config": dataclasses.asdict(config),
    }


def _metadata(about: Mapping[str, Any]) -> dict[str, str]:
    """The same for the header of a safetensors file."""
    return {name: str(about[name]) for name in ("onereplay", "model", "revision", "weights") if about[name] is not None}


def _print_json(about: Mapping[str, Any], out: Path, done: Sequence[_Done], encoder: "Encoder") -> None:
    failed = sum(row.entry.error is not None for row in done)
    items = [{**dataclasses.asdict(row.entry), "batch_ms": row.batch_ms} for row in done]
    report = encoder.report().to_dict()
    print_json(
        {**about, "out": str(out), "written": len(done) - failed, "failed": failed, "items": items, "report": report}
    )


def _print_table(about: Mapping[str, Any], out: Path, done: Sequence[_Done], encoder: "Encoder") -> None:
    print_table(
        ("name", "size", "tokens", "batch ms", "ran"),
        [(row.entry.name, row.entry.size, row.entry.tokens, _milliseconds(row), row.ran) for row in done],
        numbers=("tokens", "batch ms"),
    )
    print_line()
    failed, report = sum(row.entry.error is not None for row in done), encoder.report()
    print_line(
        f"{len(done) - failed:,} written, {failed:,} failed; {report.batches:,} batches, "
        f"{report.padding_fraction:.1%} padding; {out}"
    )
    if is_preset(about["model"]):
        print_line(f"weights are {about['weights']}: these features mean nothing, they are for measuring and testing")


def _milliseconds(row: _Done) -> str | None:
    return None if row.batch_ms is None else f"{row.batch_ms:,.1f}"
