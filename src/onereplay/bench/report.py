"""Results as people and scripts read them: a Markdown page and a JSON file of one name."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onereplay.bench.timing import Card, Spread

NOTHING = "-"
"""A cell without a value."""


def card_lines(card: Card) -> list[str]:
    """The card as a Markdown list."""
    gpu = f"{card.gpu}, driver {card.driver or 'unknown'}, CUDA {card.cuda}" if card.gpu else "none"
    return [
        f"- GPU: {gpu}",
        f"- CPU: {card.cpu}, {card.cpus} usable",
        f"- Python {card.python}, torch {card.torch}, transformers {card.transformers}, onereplay {card.onereplay}",
        f"- commit {card.commit or 'unknown'}, {card.date}",
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table: the first column to the left, the others to the right."""
    align = [":--", *["--:"] * (len(header) - 1)]
    return ["| " + " | ".join(line) + " |" for line in (header, align, *rows)]


def spread(value: Spread | None) -> str:
    """Median and p99 in milliseconds: `12.3 (12.9)`."""
    return NOTHING if value is None else f"{number(value.median)} ({number(value.p99)})"


def number(value: float | None) -> str:
    """About three digits."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A share of one, as a percentage."""
    return NOTHING if value is None else f"{value:.1%}"


def error(value: float | None) -> str:
    """A relative error, as a percentage of three digits."""
    return NOTHING if value is None else f"{100 * value:#.3g}%"


def stem(what: str, card: Card) -> str:
    """`<what>_<gpu>_<date>`."""
    return f"{what}_{card.device_slug}_{card.date}"


def write(directory: Path, name: str, data: Any, page: str) -> list[Path]:
    """Write `<name>.json` and the page beside it; results of the same name are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    contents = {directory / f"{name}.json": json.dumps(data, indent=1) + "\n", directory / f"{name}.md": page}
    for path, text in contents.items():
        path.write_text(text, encoding="utf-8")
    return list(contents)
