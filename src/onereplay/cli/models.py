"""`onereplay models`: what can be run, and the presets that need no download."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onereplay.cli.options import JsonFlag
from onereplay.cli.printing import print_json, print_line, print_table
from onereplay.errors import ConfigError, OnereplayError

if TYPE_CHECKING:
    from onereplay.presets import Preset

EXAMPLE_SIZES = ((448, 448), (1024, 768), (1920, 1080))
"""Width and height of images whose tokens are listed."""


@dataclass(frozen=True)
class _PresetRow:
    name: str
    model_type: str
    checkpoint: str
    tile_tokens: int | None
    """Tokens of one tile, for models of fixed tiles."""
    tokens: Mapping[str, int]
    """Of images of `EXAMPLE_SIZES`."""
    rows: Mapping[str, int]
    """Of their results, which may have learned rows among the tokens."""
    unknown: str
    """Why `tokens` is empty."""
    everywhere: bool
    """Whether `tokens` is known on every machine: not for image processors that need torchvision."""
    source: str
    assumed: tuple[str, ...]


MarkdownFlag = Annotated[
    bool, typer.Option("--markdown", help="Print the page docs/models.md, the same on every machine.")
]


def models(as_json: JsonFlag = False, as_markdown: MarkdownFlag = False) -> None:
    """List what can be run, and presets.

    Model types that have an adapter; presets with the checkpoint that each describes, and tokens of typical images.
    """
    from onereplay.presets import get_preset, preset_names

    if as_json and as_markdown:
        raise ConfigError("--json and --markdown contradict each other; give one of them")
    adapters = _adapters()
    presets = [_preset(get_preset(name)) for name in preset_names()]
    if as_json:
        print_json({"models": adapters, "presets": [row.__dict__ for row in presets]})
        return
    if as_markdown:
        typer.echo("\n".join(_page(adapters, presets)))
        return
    print_table(
        ("model type", "engine", "takes", "adapter"),
        [(row["model_type"], row["engine"], ", ".join(row["modalities"]), row["adapter"]) for row in adapters],
    )
    print_line()
    _print_presets(presets)


def _adapters() -> list[dict[str, Any]]:
    from onereplay.adapters.registry import ADAPTERS, adapter_class

    return [
        {
            "model_type": model_type,
            "engine": adapter_class(model_type).engine,
            "modalities": [modality.value for modality in adapter_class(model_type).modalities],
            "adapter": home,
        }
        for model_type, home in sorted(ADAPTERS.items())
    ]


def _preset(preset: "Preset") -> _PresetRow:
    from onereplay.config import EncoderCudaGraphConfig
    from onereplay.encoder import planner
    from onereplay.preprocess.processors import needs_torchvision
    from onereplay.presets import PREFIX

    preprocessor, _ = planner(f"{PREFIX}{preset.name}", EncoderCudaGraphConfig())
    tokens, rows, unknown = _tokens(preprocessor)
    return _PresetRow(
        name=f"{PREFIX}{preset.name}",
        model_type=preset.model_type,
        checkpoint=preset.checkpoint,
        tile_tokens=getattr(preprocessor.adapter, "tile_tokens", None),
        tokens=tokens,
        rows=rows,
        unknown=unknown,
        everywhere=not needs_torchvision(preset.processor),
        source=preset.source,
        assumed=preset.assumed,
    )


def _tokens(preprocessor: Any) -> tuple[dict[str, int], dict[str, int], str]:
    """Tokens and rows of the example images, or why they are not known here."""
    from PIL import Image

    try:
        sized = [preprocessor.item(Image.new("RGB", size)) for size in EXAMPLE_SIZES]
    except OnereplayError as error:
        return {}, {}, str(error)
    return {text: item.num_tokens for item, text in sized}, {text: item.num_rows for item, text in sized}, ""


def _print_presets(presets: list[_PresetRow]) -> None:
    sizes = [f"{width}x{height}" for width, height in EXAMPLE_SIZES]
    rows = [(row.name, row.checkpoint, *(row.tokens.get(size) for size in sizes), row.tile_tokens) for row in presets]
    print_table(("preset", "checkpoint", *sizes, "a tile"), rows, numbers=(*sizes, "a tile"))
    print_line()
    print_line(f"{', '.join(sizes)}: tokens of an image of that size; a tile: tokens of one, for fixed tiles.")
    print_line("A preset has random weights; append @tiny for the same structure in a size for a CPU.")
    for unknown in sorted({row.unknown for row in presets if row.unknown}):
        print_line(f"-: not known here, {unknown}")
    print_line("Assumed are values that were not read in a file of the model's publisher; a checkpoint brings its own:")
    for assumed in dict.fromkeys(row.assumed for row in presets if row.assumed):
        names = ", ".join(row.name for row in presets if row.assumed == assumed)
        print_line(f"  {names}: {', '.join(assumed)}")


def _page(adapters: Sequence[Mapping[str, Any]], presets: Sequence[_PresetRow]) -> Iterable[str]:
    """The lines of `docs/models.md`."""
    sizes = [f"{width}x{height}" for width, height in EXAMPLE_SIZES]
    yield "# Models"
    yield ""
    yield "This page is what `onereplay models --markdown` prints; a test keeps it so."
    yield ""
    yield "## Model types"
    yield ""
    yield "By the `model_type` of the configuration. The adapter's file says what is special about a model."
    yield ""
    yield from _table(
        ("model type", "engine", "takes", "adapter"),
        ([row["model_type"], row["engine"], ", ".join(row["modalities"]), _adapter_link(row)] for row in adapters),
    )
    yield ""
    yield "## Presets"
    yield ""
    yield "A preset is a published configuration, with random weights; each has a small form, `NAME@tiny`."
    yield f"{', '.join(sizes)}: tokens of an image of that size, and in brackets the rows of its result where"
    yield "they are others (learned rows, an embedding); empty where only an image processor for torchvision tells."
    yield "A tile: tokens of one, for fixed tiles."
    yield ""
    yield from _table(
        ("preset", "model type", "checkpoint", *sizes, "a tile"),
        (
            [f"`{row.name}`", row.model_type, _hub_link(row), *(_count(row, size) for size in sizes), _tile(row)]
            for row in presets
        ),
    )
    yield ""
    yield "## Assumed"
    yield ""
    yield "Values of presets that were not read in a file of the model's publisher; a checkpoint brings its own."
    yield ""
    for assumed in dict.fromkeys(row.assumed for row in presets if row.assumed):
        names = ", ".join(f"`{row.name}`" for row in presets if row.assumed == assumed)
        yield f"* {names}: {', '.join(f'`{name}`' for name in assumed)}"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    for cells in (headers, ["---"] * len(headers), *rows):
        yield f"| {' | '.join(cells)} |"


def _adapter_link(row: Mapping[str, Any]) -> str:
    module, _, name = str(row["adapter"]).partition(":")
    return f"[`{name}`](../src/{module.replace('.', '/')}.py)"


def _hub_link(row: _PresetRow) -> str:
    return f"[{row.checkpoint}](https://huggingface.co/{row.checkpoint})"


def _count(row: _PresetRow, size: str) -> str:
    if not row.everywhere or size not in row.tokens:
        return ""
    tokens, rows = row.tokens[size], row.rows[size]
    return f"{tokens:,}" if tokens == rows else f"{tokens:,} ({rows:,})"


def _tile(row: _PresetRow) -> str:
    return "" if row.tile_tokens is None else f"{row.tile_tokens:,}"
