"""`onereplay models`: what can be run, and the presets that need no download."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onereplay.cli.options import JsonFlag
from onereplay.cli.printing import print_json, print_line, print_table
from onereplay.errors import OnereplayError

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
    unknown: str
    """Why `tokens` is empty."""
    source: str
    assumed: tuple[str, ...]


def models(as_json: JsonFlag = False) -> None:
    """List what can be run, and presets.

    Model types that have an adapter; presets with the checkpoint that each describes, and tokens of typical images.
    """
    from onereplay.presets import get_preset, preset_names

    adapters = _adapters()
    presets = [_preset(get_preset(name)) for name in preset_names()]
    if as_json:
        print_json({"models": adapters, "presets": [row.__dict__ for row in presets]})
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
    from onereplay.presets import PREFIX

    preprocessor, _ = planner(f"{PREFIX}{preset.name}", EncoderCudaGraphConfig())
    tokens, unknown = _tokens(preprocessor)
    return _PresetRow(
        name=f"{PREFIX}{preset.name}",
        model_type=preset.model_type,
        checkpoint=preset.checkpoint,
        tile_tokens=getattr(preprocessor.adapter, "tile_tokens", None),
        tokens=tokens,
        unknown=unknown,
        source=preset.source,
        assumed=preset.assumed,
    )


def _tokens(preprocessor: Any) -> tuple[dict[str, int], str]:
    """Tokens of the example images, or why they are not known here."""
    from PIL import Image

    try:
        sized = [preprocessor.item(Image.new("RGB", size)) for size in EXAMPLE_SIZES]
    except OnereplayError as error:
        return {}, str(error)
    return {text: item.num_tokens for item, text in sized}, ""


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
