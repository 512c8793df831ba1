"""Mixed traffic from the first request to the last, preparation included: capture, compilation, recording.

    python benchmarks/bench_traffic.py preset:qwen2_5_vl-7b --batches 200 --out benchmarks/results

Each way (of `onereplay.bench.ways`) starts from a loaded model and encodes the same batches of a mix once, one behind
the other; the clock runs from before its first preparation. Ways run one behind the other in one process, ours first. A
way that is over `--limit` seconds is stopped after the batch that it is in, and its row says how far it came. Pixels
lie on the device before the clock starts. On-disk caches of compilers are as the machine has them: `--note` says which.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from onereplay.adapters import adapter_for
from onereplay.bench.inputs import workload
from onereplay.bench.report import card_lines, stem, table, write
from onereplay.bench.timing import card, synchronize
from onereplay.bench.ways import WAYS, Prepared, Ways
from onereplay.config import EncoderCudaGraphConfig
from onereplay.encoder import load_model

MILESTONES = (1, 10, 50, 100, 200, 500)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run each way over the same batches."""
    options = _parse(arguments)
    config = EncoderCudaGraphConfig(attention=options.attention)
    ways = Ways(adapter_for(load_model(options.model, None, None, config), config), config)
    adapter = ways.adapter
    batches = [Prepared.of(adapter, shape) for shape in workload(options.workload, adapter, (), options.batches)]
    with torch.no_grad():
        _ = batches[0].resident
        synchronize(adapter.device)
        rows = [_run(ways, way, batches, options.limit) for way in options.ways]
    where = card(adapter.device, options.commit)
    page = _page(options, rows, where, len(batches))
    print(page)
    if options.out is not None:
        name = stem(f"traffic_{options.model.removeprefix('preset:')}", where)
        write(options.out, name, {"card": asdict(where), "note": options.note, "ways": rows}, page)
    ways.close()


def _run(ways: Ways, way: str, batches: Sequence[Prepared], limit: float) -> dict[str, Any]:
    device, seconds = ways.adapter.device, []
    start = time.perf_counter()
    try:
        for batch in batches:
            ways.call(way, batch)()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            if seconds[-1] > limit:
                break
        error = ""
    except Exception as failure:  # what a compiler does with a model is its result
        error = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]:.200}"
    memory = torch.cuda.memory_reserved(device) / 2**20 if device.type == "cuda" else None
    print(f"{way}: {len(seconds)} batches in {seconds[-1] if seconds else 0:.1f} s {error}", flush=True)
    return {"way": way, "seconds": seconds, "error": error, "reserved_mib": memory}


def _page(options: argparse.Namespace, rows: Sequence[dict[str, Any]], where: Any, count: int) -> str:
    marks = [mark for mark in MILESTONES if mark <= count]
    body = [
        [
            row["way"],
            *(f"{row['seconds'][mark - 1]:.2f}" if mark <= len(row["seconds"]) else "-" for mark in marks),
            str(len(row["seconds"])),
            f"{row['seconds'][-1]:.1f}" if row["seconds"] else "-",
            row["error"],
        ]
        for row in rows
    ]
    head = ["way", *(f"s after {mark}" for mark in marks), "batches", "s in all", "stopped by"]
    lines = [
        f"# {count} batches of {options.workload} through {options.model}, preparation included",
        *card_lines(where),
        f"- {options.note}" if options.note else "",
        "",
        *table(head, body),
    ]
    return "\n".join(line for line in lines if line is not None) + "\n"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workload", default="mix-v1")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["replay", "plain", "compile", "reduce-overhead"])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a way may take")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--note", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
