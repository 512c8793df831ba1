"""Where the time of a replay goes: GPU time by kind of kernel, kernel by kernel, and Python's share of a call.

    python benchmarks/profile_replay.py preset:qwen2_5_vl-7b --cases 1x224 1x896 5x896 --out benchmarks/results

Needs a CUDA device. Batches are those of the workload `cases`. Kernel times are CUPTI's, of replays behind one another,
the first ones left out; a gap lies between the end of a kernel and the start of the next. Times of whole calls are
those of `onereplay bench`.
"""

import argparse
import cProfile
import dataclasses
import io
import pstats
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_for
from onereplay.bench.inputs import CASES, Shape, case, num_tokens, processor_outputs, with_pixels_on
from onereplay.bench.report import card_lines, stem, table, write
from onereplay.bench.roofline import Roofline, encoder_flops, measure_roofline, weight_bytes
from onereplay.bench.timing import card
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.encoder import load_model

KINDS = (
    ("attention", r"flash|fmha|attention|FlashAttn"),
    ("product", r"gemm|nvjet|cutlass|wgmma|xmma|splitK|cublas"),
    ("copy", r"memcpy|Memcpy|copy_|CatArray|direct_copy"),
    ("norm", r"layer_norm|rms|red_fused|per_fused"),
    ("elementwise", r"triton_poi|elementwise|vectorized"),
    ("gather", r"index|gather"),
)
"""Kinds of kernels by their names, the first that matches."""
REPLAYS = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile one model."""
    options = _parse(arguments)
    config = EncoderCudaGraphConfig(attention=options.attention, backend="cuda", optimize=options.optimize)
    adapter = adapter_for(load_model(options.model, "cuda", None, config), config)
    shapes = [case(adapter, name) for name in options.cases]
    levels = tuple(num_tokens(adapter, shape) for shape in shapes)
    manager = EncoderCudaGraphManager(adapter, dataclasses.replace(config, token_budgets=levels))
    with torch.no_grad(), manager:
        manager.capture()
        roofline = measure_roofline(adapter.device, adapter.dtype)
        found = [_profiled(manager, shape, roofline) for shape in shapes]
        where = card(adapter.device, options.commit)
    page = _page(options.model, found, where)
    print(page)
    if options.out is not None:
        name = stem(f"kernels_{options.model.removeprefix('preset:')}", where)
        write(options.out, name, {"card": asdict(where), "roofline": asdict(roofline), "batches": found}, page)


def _profiled(manager: EncoderCudaGraphManager[Any], shape: Shape, roofline: Roofline) -> dict[str, Any]:
    adapter: Any = manager.adapter
    inputs = processor_outputs(adapter, shape, adapter.dtype)
    resident = with_pixels_on(inputs, adapter.device, adapter.dtype)

    def call() -> object:
        return manager.encode(adapter.batch(**resident))

    kernels = _kernels(call)
    shares: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    for name, microseconds, _ in kernels:
        shares[_kind(name)] += microseconds / 1e3
        names[name].append(microseconds)
    gaps = sum(gap for *_, gap in kernels) / 1e3
    host, listing = _host(call)
    return {
        "batch": shape.name,
        "tokens": num_tokens(adapter, shape),
        "kernels": len(kernels),
        "busy_ms": sum(shares.values()),
        "gaps_ms": gaps,
        "limit_ms": roofline.limit_ms(encoder_flops(adapter, resident), weight_bytes(adapter)),
        "kinds_ms": dict(sorted(shares.items(), key=lambda entry: -entry[1])),
        "names": [
            {"name": name, "launches": len(times), "total_ms": sum(times) / 1e3, "median_us": statistics.median(times)}
            for name, times in sorted(names.items(), key=lambda entry: -sum(entry[1]))
        ],
        "order": [[name[:60], round(microseconds, 2), round(gap, 2)] for name, microseconds, gap in kernels],
        "host_ms": host,
        "host_profile": listing,
    }


def _kernels(call: Any) -> list[tuple[str, float, float]]:
    """Name, microseconds and the gap before it, of every kernel of the last of some calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPLAYS):
            call()
        torch.cuda.synchronize()
    events = sorted(
        (event for event in profile.events() or () if event.device_type == DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    events = events[-(len(events) // REPLAYS) :]
    found, end = [], events[0].time_range.start
    for event in events:
        found.append((event.name, event.time_range.elapsed_us(), max(0.0, event.time_range.start - end)))
        end = max(end, event.time_range.end)
    return found


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def _host(call: Any, repeats: int = 200) -> tuple[float, str]:
    """Milliseconds from a call to its return, the device being idle, and Python's profile of it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    profile = cProfile.Profile()
    for _ in range(repeats):
        torch.cuda.synchronize()
        profile.runcall(call)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(35)
    return statistics.median(times) * 1e3, text.getvalue()


def _page(model: str, found: Sequence[dict[str, Any]], where: Any) -> str:
    kinds = sorted({kind for batch in found for kind in batch["kinds_ms"]})
    head = ["batch", "tokens", "kernels", "busy, ms", "gaps, ms", "limit, ms", "host, ms", *kinds]
    rows = [
        [
            batch["batch"],
            f"{batch['tokens']:,}",
            str(batch["kernels"]),
            *(f"{batch[key]:.3f}" for key in ("busy_ms", "gaps_ms", "limit_ms", "host_ms")),
            *(f"{batch['kinds_ms'].get(kind, 0.0):.3f}" for kind in kinds),
        ]
        for batch in found
    ]
    parts = [f"# Where a replay of {model} spends its time", *card_lines(where), "", *table(head, rows)]
    for batch in found:
        top = [
            [entry["name"][:90], str(entry["launches"]), f"{entry['total_ms']:.3f}", f"{entry['median_us']:.1f}"]
            for entry in batch["names"][:16]
        ]
        parts += ["", f"## {batch['batch']}", "", *table(["kernel", "launches", "ms", "median, us"], top)]
    return "\n".join(parts) + "\n"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["1x224", "1x896", "5x896"])
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--optimize", type=lambda text: tuple(text.split(",")), default=None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
