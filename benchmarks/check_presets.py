"""`onereplay check` over many presets in one process, as a table.

    python benchmarks/check_presets.py --out benchmarks/results [--presets NAME ...] [--budgets 64 1024]

Random weights. A claim holds if the relative error against a float32 copy of the model is at most 1.1 times plain
transformers' own; see `onereplay.checking`. The result is written again after every preset, so a run that is cut keeps
what it had.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from onereplay.adapters import adapter_class
from onereplay.bench.report import card_lines, stem, table, write
from onereplay.bench.timing import Card, card
from onereplay.checking import CheckResult, check_model
from onereplay.errors import OnereplayError
from onereplay.presets import get_preset, hf_config, preset_names


def main(arguments: Sequence[str] | None = None) -> None:
    """Check one preset after the other."""
    options = _parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where, rows = card(device, options.commit), []
    for name in options.presets:
        rows.append(_check(name, options.budgets))
        print(_in_words(rows[-1]), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if options.out is not None:
            write(options.out, stem(options.name, where), {"card": asdict(where), "models": rows}, _page(rows, where))
    print(_page(rows, where))


def _check(name: str, budgets: Sequence[int]) -> dict[str, Any]:
    """The claims of one preset; an error of the library in place of claims is a result too."""
    start = time.perf_counter()
    try:
        results = check_model(f"preset:{name}", budgets=_budgets(name, budgets))
    except (OnereplayError, RuntimeError) as error:
        results = [CheckResult("the model can be made and captured", False, f"{type(error).__name__}: {error}"[:500])]
    return {
        "preset": name,
        "claims": len(results),
        "held": sum(result.passed for result in results),
        "largest_ratio": max(map(_ratio, results)),
        "seconds": time.perf_counter() - start,
        "failed": [asdict(result) for result in results if not result.passed],
    }


def _budgets(name: str, budgets: Sequence[int]) -> tuple[int, ...]:
    """The budgets asked for; a model of tiles has none below a tile."""
    preset = get_preset(name)
    adapter = adapter_class(preset.model_type)(hf_config(preset))
    unit = max(adapter.unit(path) for path in adapter.paths())
    return tuple(sorted({max(budget, unit) for budget in budgets}))


def _ratio(result: CheckResult) -> float:
    """Our error over plain transformers', from the claim's words; 0 where it compares nothing."""
    return max((float(found) for found in re.findall(r"ratio ([\d.]+)", result.detail)), default=0.0)


def _in_words(row: dict[str, Any]) -> str:
    first = row["failed"][0] if row["failed"] else None
    failed = f"; first: {first['claim']}: {first['detail'][:300]}" if first else ""
    ratio = row["largest_ratio"]
    return f"{row['preset']}: {row['held']} of {row['claims']}, ratio {ratio:.3f}, {row['seconds']:.0f} s{failed}"


def _page(rows: Sequence[dict[str, Any]], where: Card) -> str:
    cells = [
        [row["preset"], str(row["claims"]), str(row["held"]), f"{row['largest_ratio']:.3f}", f"{row['seconds']:.0f}"]
        for row in rows
    ]
    lines = [
        "# `onereplay check` over presets",
        "",
        *card_lines(where),
        f"- random weights; `python benchmarks/check_presets.py {' '.join(sys.argv[1:])}`",
        "",
        "A claim holds if the relative error against a float32 copy of the model is at most 1.1 times plain",
        "transformers' own in the same dtype. The ratio is the largest of all claims.",
        "",
        *table(("preset", "claims", "held", "largest ratio", "seconds"), cells),
    ]
    for row in rows:
        lines += ["", *(f"- {row['preset']}: {one['claim']}: {one['detail']}" for one in row["failed"])][
            : 6 if row["failed"] else 0
        ]
    return "\n".join(lines) + "\n"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check_presets", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presets", nargs="+", default=preset_names())
    parser.add_argument("--budgets", nargs="+", type=int, default=(64, 1024))
    parser.add_argument("--name", default="check_presets", help="of the result")
    parser.add_argument("--commit", help="what the card names, for a copy of the sources without git")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
