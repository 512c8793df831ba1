"""`DataParallelEncoder` on real ranks: is it right, how fast, what is lost to imbalance and the gather, does it hold?

    torchrun --nproc-per-node 2 benchmarks/bench_data_parallel.py --model preset:qwen2_5_vl-7b --out benchmarks/results

NCCL where every rank has a GPU of its own, gloo elsewhere. Every rank has the same random weights and is given the same
batches. Rank 0 writes the result.

* right: batches of many kinds (ranks without items, no items, an item over the cap) against the same encoder on one
  rank alone, as relative norms; and both, and the stock model, against the stock model in float32;
* failure: one rank raises; how long until every rank has raised;
* speed: `mix-v1` and 20 images of 336x336, wall milliseconds until every rank is idle, against rank 0 alone;
* imbalance: the share of the ranks' time in which the less loaded wait, in tokens; for 2, 4 and 8 ranks, from sizes;
* soak: random batches for a while; memory before and after.
"""

import argparse
import copy
import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onereplay import DataParallelEncoder, Encoder
from onereplay.adapters.base import Adapter
from onereplay.bench.inputs import Shape, num_tokens, picture, processor_outputs, with_pixels_on, workload
from onereplay.bench.report import card_lines, error, number, percent, stem, table, write
from onereplay.bench.timing import card, synchronize
from onereplay.checking import exact_products, plain_features
from onereplay.errors import OnereplayError
from onereplay.parallel import load_of, spread

Inputs = dict[str, Any]


def main() -> None:
    """Run on this rank."""
    options = _parse(sys.argv[1:])
    local = int(os.environ.get("LOCAL_RANK", "0"))
    own_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device(f"cuda:{local if own_gpu else 0}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    nccl = device.type == "cuda" and own_gpu
    dist.init_process_group("nccl" if nccl else "gloo", device_id=device if nccl else None)
    results = [_model(model, device, options) for model in options.model]
    if dist.get_rank() == 0:
        _write(results, device, options)
    dist.barrier()
    dist.destroy_process_group()


def _model(model: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    with Encoder.from_spec(model, device=device) as encoder, DataParallelEncoder(encoder) as parallel:
        say = print if dist.get_rank() == 0 else _silent
        report = encoder.report().capture
        found: dict[str, Any] = {"model": model, "backend": dist.get_backend(), "ranks": parallel.num_ranks}
        found["graph_mib_per_rank"] = (report.static_bytes + report.pool_bytes) / 2**20
        found["right"] = _right(parallel)
        say(f"{model}: right {found['right']}")
        found["failure_seconds"] = _failure(parallel)
        found["speed"] = _speed(parallel, options)
        say(f"{model}: speed {found['speed']}")
        found["imbalance"] = _imbalance(encoder.adapter)
        found["soak"] = _soak(parallel, options.soak) if options.soak else None
        say(f"{model}: soak {found['soak']}, failure {found['failure_seconds']:.2f} s")
        return found


def _silent(text: str) -> None:
    pass


# ---------------------------------------------------------------------------------------------------------------------
# Right
# ---------------------------------------------------------------------------------------------------------------------


def _right(parallel: DataParallelEncoder) -> dict[str, dict[str, float]]:
    """For each batch: the relative norm of the difference to this rank's own encoder alone, the worst item over all
    ranks; and the errors against the stock model in float32, of all ranks together and of the stock model."""
    encoder = parallel.encoder
    adapter = encoder.adapter
    exact = copy.deepcopy(adapter.model).float()
    mixed = [shape for shape in workload("mix-v1", adapter, (), 60) if num_tokens(adapter, shape) < 4000]
    batches = {
        "one item, the other ranks empty": Shape("", mixed[0].items[:1]),
        "five items": Shape("", tuple(item for shape in mixed for item in shape.items)[:5]),
        "seventeen items": Shape("", tuple(picture(adapter, 224 + 32 * n, 448) for n in range(17))),
        "an item over the cap": Shape("", (*mixed[0].items[:1], *_over_the_cap(adapter))),
    }
    found = {}
    for name, shape in batches.items():
        inputs = processor_outputs(adapter, shape, encoder.dtype)
        single, together = encoder.encode_inputs(**inputs), parallel.encode_inputs(**inputs)
        assert [len(rows) for rows in single] == [len(rows) for rows in together], name
        found[name] = {"difference": _worst(max(map(_difference, together, single)), encoder.device)}
        if num_tokens(adapter, shape) < 4000:
            resident = with_pixels_on(inputs, encoder.device, encoder.dtype)
            with exact_products():
                reference = plain_features(adapter, exact, with_pixels_on(inputs, encoder.device, torch.float32))
            plain = plain_features(adapter, adapter.model, resident)
            found[name]["error"] = _worst(_difference(torch.cat(together), reference), encoder.device)
            found[name]["error_plain"] = _difference(plain, reference)
    assert parallel.encode_inputs() == []
    return found


def _over_the_cap(adapter: Adapter[Any]) -> tuple[Any, ...]:
    """Items that no default budget holds: pictures of 6,400 tokens, or as many as it takes."""
    found: list[Any] = []
    while num_tokens(adapter, Shape("", tuple(found))) <= 5120:
        found.append(picture(adapter, 2240, 2240))
    return tuple(found)


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _worst(value: float, device: torch.device) -> float:
    most = torch.tensor(value, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def _failure(parallel: DataParallelEncoder) -> float:
    """Seconds until the slowest rank has raised, when the last rank raises at once."""
    encoder = parallel.encoder
    shape = Shape("", tuple(picture(encoder.adapter, 448, 448) for _ in range(2 * parallel.num_ranks)))
    inputs = processor_outputs(encoder.adapter, shape, encoder.dtype)
    stock = encoder.manager.encode

    def broken(batch: Any) -> list[Tensor]:
        raise RuntimeError("this rank fails on purpose")

    if parallel.rank == parallel.num_ranks - 1:
        encoder.manager.encode = broken  # type: ignore[method-assign]
    start = time.perf_counter()
    try:
        parallel.encode_inputs(**inputs)
        message = ""
    except (OnereplayError, RuntimeError) as error:
        message = str(error)
    encoder.manager.encode = stock  # type: ignore[method-assign]
    assert "fails on purpose" in message
    seconds = _worst(time.perf_counter() - start, encoder.device)
    parallel.encode_inputs(**inputs)
    return seconds


# ---------------------------------------------------------------------------------------------------------------------
# Fast
# ---------------------------------------------------------------------------------------------------------------------


def _speed(parallel: DataParallelEncoder, options: argparse.Namespace) -> dict[str, Any]:
    adapter = parallel.encoder.adapter
    twenty = Shape("20 images of 336x336", tuple(picture(adapter, 336, 336) for _ in range(20)))
    mix = workload("mix-v1", adapter, (), options.batches)
    return {
        "20 images of 336x336": _times(parallel, [twenty], options.repeats),
        f"mix-v1, {len(mix)} batches": _times(parallel, mix, 3),
    }


def _times(parallel: DataParallelEncoder, shapes: Sequence[Shape], repeats: int) -> dict[str, float]:
    """Milliseconds of a batch: sums of medians over the batches, divided by their number; ratios of the sums."""
    encoder = parallel.encoder
    single, together, gather, exchange = [], [], [], []
    for shape in shapes:
        inputs = processor_outputs(encoder.adapter, shape, encoder.dtype)
        resident = with_pixels_on(inputs, encoder.device, encoder.dtype)
        together.append(_median(parallel, functools.partial(parallel.encode_inputs, **resident), repeats))
        single.append(_median(parallel, functools.partial(encoder.encode_inputs, **resident), repeats))
        items = encoder.adapter.batch(**inputs).items
        shares = spread([load_of(item) for item in items], parallel.num_ranks)
        padded, heard = parallel._gather_buffers(items, shares)
        gather.append(_median(parallel, functools.partial(parallel._gather, padded, heard, items, shares), repeats))
        exchange.append(_median(parallel, functools.partial(parallel._exchange, 0, ""), repeats))
    count = len(shapes)
    return {
        "single_ms": sum(single) / count,
        "parallel_ms": sum(together) / count,
        "times_faster": sum(single) / sum(together),
        "gather_ms": sum(gather) / count,
        "exchange_ms": sum(exchange) / count,
        "gather_share": sum(gather) / sum(together),
    }


def _median(parallel: DataParallelEncoder, call: Callable[[], object], repeats: int) -> float:
    """Wall milliseconds from a common start until the slowest rank's device is idle; the same on every rank."""
    device = parallel.encoder.device
    call()
    samples = []
    for _ in range(repeats):
        synchronize(device)
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        samples.append(time.perf_counter() - start)
    slowest = torch.tensor(samples, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(statistics.median(slowest.tolist())) * 1e3


def _imbalance(adapter: Adapter[Any]) -> dict[str, float]:
    """`1 - mean load / largest load` of `mix-v1`, weighted by load, from sizes alone."""
    found = {}
    for num_ranks in (2, 4, 8):
        waited = total = 0
        for shape in workload("mix-v1", adapter, ()):
            loads = [num_tokens(adapter, Shape("", (item,))) for item in shape.items]
            most = max(sum(loads[place] for place in share) for share in spread(loads, num_ranks))
            waited += most * num_ranks - sum(loads)
            total += most * num_ranks
        found[str(num_ranks)] = waited / total
    return found


def _soak(parallel: DataParallelEncoder, seconds: float) -> dict[str, float]:
    """Random batches until the time is over; every result is checked for its number of rows and for NaN."""
    encoder = parallel.encoder
    draw = random.Random(1)
    shapes = workload("mix-v1", encoder.adapter, (), 100)
    prepared = [
        with_pixels_on(processor_outputs(encoder.adapter, shape, encoder.dtype), encoder.device, encoder.dtype)
        for shape in shapes
        if num_tokens(encoder.adapter, shape) < 6000
    ]
    for inputs in prepared:  # reach the highest memory before it is noted
        parallel.encode_inputs(**inputs)
    before, batches, items, start = _memory(encoder.device), 0, 0, time.perf_counter()
    go_on = torch.ones(1, device=encoder.device)
    while float(go_on):
        features = parallel.encode_inputs(**draw.choice(prepared))
        assert not any(bool(rows.isnan().any()) for rows in features)
        batches, items = batches + 1, items + len(features)
        go_on.fill_(time.perf_counter() - start < seconds)
        dist.broadcast(go_on, 0)  # rank 0's clock decides for all
    return {
        "seconds": time.perf_counter() - start,
        "batches": batches,
        "items": items,
        "allocated_mib_before": before[0],
        "allocated_mib_after": _memory(encoder.device)[0],
        "reserved_mib_before": before[1],
        "reserved_mib_after": _memory(encoder.device)[1],
    }


def _memory(device: torch.device) -> tuple[float, float]:
    if device.type != "cuda":
        return 0.0, 0.0
    synchronize(device)
    return torch.cuda.memory_allocated(device) / 2**20, torch.cuda.memory_reserved(device) / 2**20


# ---------------------------------------------------------------------------------------------------------------------
# The result
# ---------------------------------------------------------------------------------------------------------------------


def _write(results: list[dict[str, Any]], device: torch.device, options: argparse.Namespace) -> None:
    where = card(device, options.commit)
    ranks = results[0]["ranks"]
    command = f"torchrun --nproc-per-node {ranks} benchmarks/bench_data_parallel.py {' '.join(sys.argv[1:])}"
    text = _page(results, [*card_lines(where), f"- {ranks} ranks, {results[0]['backend']}; `{command}`"])
    print(text)
    if options.out is not None:
        name = stem(f"data_parallel_{ranks}ranks", where)
        for path in write(options.out, name, {"command": command, "card": asdict(where), "models": results}, text):
            print(f"wrote {path}")
    else:
        print(json.dumps(results))


def _page(results: list[dict[str, Any]], head: list[str]) -> str:
    speed = [
        [result["model"], name, *(number(times[key]) for key in _COLUMNS), percent(times["gather_share"])]
        for result in results
        for name, times in result["speed"].items()
    ]
    right = [
        [result["model"], name, *(error(values.get(key)) for key in ("difference", "error", "error_plain"))]
        for result in results
        for name, values in result["right"].items()
    ]
    other = [
        [
            result["model"],
            number(result["graph_mib_per_rank"]),
            f"{result['failure_seconds']:.2f}",
            *(percent(result["imbalance"][count]) for count in ("2", "4", "8")),
            _in_words(result["soak"]),
        ]
        for result in results
    ]
    lines = [
        "# The data-parallel encoder on several ranks",
        "",
        *head,
        "",
        "bfloat16 on GPUs, random weights. Milliseconds are wall time until the slowest rank is idle, pixels on each",
        "device, medians; exchange is the ranks' word to each other on the host, gather the one `all_gather` and the",
        "split, both measured alone. Differences and errors are relative norms, of the worst item and of the batch.",
        "",
        *table(("model", "batches", "one rank", "parallel", "times faster", "exchange", "gather", "its share"), speed),
        "",
        *table(("model", "batch", "difference to one rank", "error against float32", "plain's error"), right),
        "",
        *table(
            ("model", "graph MiB a rank", "s until all ranks raise", *(f"imbalance, {n}" for n in (2, 4, 8)), "soak"),
            other,
        ),
    ]
    return "\n".join(lines) + "\n"


_COLUMNS = ("single_ms", "parallel_ms", "times_faster", "exchange_ms", "gather_ms")


def _in_words(soak: dict[str, float] | None) -> str:
    if soak is None:
        return "-"
    return (
        f"{soak['batches']:,} batches in {soak['seconds']:.0f} s; allocated {soak['allocated_mib_before']:,.0f} to "
        f"{soak['allocated_mib_after']:,.0f} MiB, reserved {soak['reserved_mib_before']:,.0f} to "
        f"{soak['reserved_mib_after']:,.0f} MiB"
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_data_parallel", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", default=["preset:qwen2_5_vl-7b"])
    parser.add_argument("--batches", type=int, default=100, help="of mix-v1")
    parser.add_argument("--repeats", type=int, default=20, help="of the 20 images")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds")
    parser.add_argument("--commit", help="what the card names, for a copy of the sources without git")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
