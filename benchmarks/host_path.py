"""The host's share of a replay: microseconds from a call until its graph is launched and until it returns.

    python benchmarks/host_path.py preset:qwen2_5_vl-7b --out benchmarks/results

In the clock is everything from what a processor returns: items, plan, metadata, copies, launch, results. The device is
idle before each call. On a machine without CUDA nothing runs: weights and static buffers lie on PyTorch's `meta` device
and a replay is empty, so what is left is Python and the dispatch of PyTorch; the results then say `no device`.
"""

import argparse
import cProfile
import io
import itertools
import pstats
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onereplay import EncoderCudaGraphConfig
from onereplay.adapters import adapter_class, adapter_for
from onereplay.adapters.grids import GridAdapter
from onereplay.adapters.tiles import TileAdapter
from onereplay.bench.inputs import Inputs, with_pixels_on
from onereplay.bench.report import card_lines, number, stem, table, write
from onereplay.bench.timing import Spread, card, synchronize
from onereplay.core.graphs import Graph, GraphBackend, TracedGraphs, no_garbage_collection
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.encoder import load_model
from onereplay.geometry import Grid
from onereplay.loading import vision_model
from onereplay.presets import PREFIX, get_preset, hf_config

IMAGES = 64
STAGES = ("items", "launched", "returned")
"""Until the batch is made, until its last graph is launched, until the results are there."""


class _Stamped:
    """A graph that says when it was launched; without a graph it launches nothing."""

    launched = 0.0

    def __init__(self, graph: Graph | None) -> None:
        self._graph = graph

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        _Stamped.launched = time.perf_counter()


class _StampedGraphs(TracedGraphs):
    """A back end of such graphs: those of another back end, or empty ones."""

    def __init__(self, backend: GraphBackend | None) -> None:
        super().__init__()
        self._backend = backend
        self.name = backend.name if backend else "no device"

    def capture(self, forward: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Graph:
        return _Stamped(self._backend.capture(forward, inputs, outputs) if self._backend else None)

    def close(self) -> None:
        if self._backend:
            self._backend.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one model."""
    options = _parse(arguments)
    config = EncoderCudaGraphConfig(attention=options.attention, optimize=options.optimize)
    on_gpu = torch.cuda.is_available()
    model = load_model(options.model, "cuda", None, config) if on_gpu else _without_weights(options.model)
    manager: EncoderCudaGraphManager[Any] = EncoderCudaGraphManager(adapter_for(model, config), config)
    manager._backend = _StampedGraphs(manager._backend if on_gpu else None)
    with torch.no_grad(), manager:
        manager.capture()
        in_place = on_gpu and isinstance(manager.adapter, GridAdapter | TileAdapter)  # pixels as they lie in the buffer
        found = [
            _measured(manager, name, batches, pixels, options.repeats)
            for name, batches in _batches(manager.adapter).items()
            for pixels in ("device", *(["in place"] if in_place else []), "host")
        ]
        where = card(torch.device("cuda" if on_gpu else "cpu"), options.commit)
    page = _page(options.model, manager._backend.name, found, where)
    print(page)
    if options.out is not None:
        name = stem(f"host_path_{options.model.removeprefix(PREFIX)}", where)
        write(options.out, name, {"card": asdict(where), "backend": manager._backend.name, "batches": found}, page)


def _without_weights(spec: str) -> Any:
    """The vision modules of a preset on the meta device."""
    preset = get_preset(spec.removeprefix(PREFIX))
    parts = adapter_class(preset.model_type).parts
    return vision_model(hf_config(preset), device="meta", dtype=torch.bfloat16, parts=parts)


def _batches(adapter: Any) -> dict[str, Callable[[], Iterator[Inputs]]]:
    """By name: inputs for one call after the other, pixels on the CPU in float32."""
    sides = range(4, 12)
    grids = [Grid(1, 2 * height, 2 * width) for height in sides for width in sides][:IMAGES]
    one, same, different = (
        dict(adapter.example_inputs(chosen, torch.Generator().manual_seed(0)))
        for chosen in ([Grid(1, 16, 16)], [Grid(1, 16, 16)] * IMAGES, grids)
    )
    shuffle = random.Random(0)

    def reordered() -> Iterator[Inputs]:
        """Grids in an order that was not there before. Pixels are as many in each order, and any will do."""
        while True:
            yield different | {
                name: torch.tensor(shuffle.sample(grids, IMAGES)) for name in different if name.endswith("_grid_thw")
            }

    batches: dict[str, Callable[[], Iterator[Inputs]]] = {
        "1 image": lambda: itertools.repeat(one),
        f"{IMAGES} images of one grid": lambda: itertools.repeat(same),
        f"{IMAGES} images of {IMAGES} grids": lambda: itertools.repeat(different),
    }
    if any(name.endswith("_grid_thw") for name in different):
        batches[f"{IMAGES} images of {IMAGES} grids, each time in another order"] = reordered
    return batches


@contextmanager
def _area(manager: EncoderCudaGraphManager[Any], inputs: Inputs) -> Iterator[Inputs]:
    """The inputs with their pixels in the static buffer, as if they had been written there."""
    (name,) = (name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point())
    with manager.staging_area(len(inputs[name])) as area:
        yield inputs | {name: area}


def _measured(
    manager: EncoderCudaGraphManager[Any],
    name: str,
    batches: Callable[[], Iterator[Inputs]],
    pixels: str,
    repeats: int,
) -> dict[str, Any]:
    adapter: Any = manager.adapter
    prepared = batches()
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    profile = cProfile.Profile()
    resident: dict[int, Tensor] = {}

    def placed(inputs: Inputs) -> Inputs:
        if pixels == "host":
            return inputs
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.is_floating_point() and id(value) not in resident:
                resident[id(value)] = with_pixels_on({name: value}, manager.device, manager.dtype)[name]
        return {name: resident.get(id(value), value) for name, value in inputs.items()}

    def call(inputs: Inputs) -> None:
        start = time.perf_counter()
        with _area(manager, inputs) if pixels == "in place" else nullcontext(inputs) as given:
            batch = adapter.batch(**given)
            made = time.perf_counter()
            manager.encode(batch)
        end = time.perf_counter()
        for stage, at in zip(STAGES, (made, _Stamped.launched, end), strict=True):
            seconds[stage].append(at - start)

    with no_garbage_collection():
        for turn in range(-20, repeats):
            inputs = placed(next(prepared))
            synchronize(manager.device)
            call(inputs)
            if turn < 0:
                seconds = {stage: [] for stage in STAGES}
        timed = {stage: Spread.of(times) for stage, times in seconds.items()}
        for _ in range(repeats):
            inputs = placed(next(prepared))
            synchronize(manager.device)
            profile.runcall(call, inputs)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(40)
    return {
        "batch": name,
        "pixels": pixels,
        "plan": str(manager.plan(adapter.batch(**inputs))),
        "microseconds": {stage: {"median": 1e3 * s.median, "p99": 1e3 * s.p99} for stage, s in timed.items()},
        "profile": text.getvalue(),
    }


def _page(model: str, backend: str, found: Sequence[dict[str, Any]], where: Any) -> str:
    rows = [
        [
            batch["batch"],
            batch["pixels"],
            *(f"{number(one['median'])} ({number(one['p99'])})" for one in batch["microseconds"].values()),
        ]
        for batch in found
    ]
    lines = [
        f"# The host's share of a replay of {model}",
        "",
        *card_lines(where),
        f"- back end: {backend}",
        "",
        "Microseconds from the call until the batch is made, until its graph is launched, and until it returns: median",
        "(p99). Pixels lie on the device in the model's type, there in the static buffer (in place), or on the host in",
        "float32.",
        "",
        *table(("batch", "pixels", *STAGES), rows),
    ]
    return "\n".join(lines) + "\n"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="without CUDA a preset, `preset:NAME`")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--optimize", type=lambda text: tuple(text.split(",")), default=None)
    parser.add_argument("--commit", help="what the card names, for a copy of the sources without git")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
