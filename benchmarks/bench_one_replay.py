"""What does one replay cost against plain transformers and against eager, from 64 to 8,192 tokens?

    python -m benchmarks.bench_one_replay --out benchmarks/results

For each preset (random weights), in one process and on the same inputs, three ways to encode a batch:

* plain: the stock model's `get_image_features` as transformers loads it;
* eager: this project's forward without a graph;
* ours: this project with graphs: one replay, or one eager forward where no budget holds the batch.

Errors are relative norms against plain transformers in float32 (a copy of the same weights, no TF32), for batches of up
to 1,024 tokens.
"""

import argparse
import copy
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import Inputs, Shape, for_stock_method, num_tokens, processor_outputs, shapes, with_pixels_on
from benchmarks.one_replay_page import (
    OURS_FROM_HOST,
    OURS_INSIDE,
    PLAIN_FROM_HOST,
    PLAIN_INSIDE,
    REFERENCE_TOKENS,
    RESIDENT,
    CaptureCost,
    Cost,
    ModelResult,
    Result,
    Row,
    page,
)
from benchmarks.report import number, write
from benchmarks.roofline import Roofline, encoder_flops, measure_roofline, weight_bytes
from benchmarks.timing import Timing, card, measure
from onereplay.adapters import adapter_class, adapter_for
from onereplay.adapters.base import Adapter
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.budgets import DEFAULT_MAX_TOKEN_BUDGET
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Eager, Plan, Replay
from onereplay.loading import random_weights_, vision_model
from onereplay.presets import Preset, get_preset, hf_config

PRESETS = ("qwen2_5_vl-7b", "internvl3-8b", "lfm2_vl-1.6b")
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 5120, 8192)


@dataclass(frozen=True, slots=True)
class Options:
    """What to run."""

    presets: tuple[str, ...]
    tokens: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    repeats: int
    seconds: float
    max_token_budget: int | None
    commit: str | None
    out: Path | None

    @property
    def config(self) -> EncoderCudaGraphConfig:
        """The encoder's options."""
        return EncoderCudaGraphConfig(max_token_budget=self.max_token_budget)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def run(options: Options, command: str) -> Result:
    """Every preset, one after the other."""
    with torch.no_grad():
        roofline = measure_roofline(options.device, options.dtype)
        _say(str(roofline))
        models = tuple(_run_preset(get_preset(name), options, roofline) for name in options.presets)
    dtype = str(options.dtype).removeprefix("torch.")
    return Result(command, card(options.device, options.commit), str(options.device), dtype, roofline, models)


def _run_preset(preset: Preset, options: Options, roofline: Roofline) -> ModelResult:
    adapter, stock = _build(preset, options)
    batches = shapes(adapter, preset, options.tokens)
    references = _references(preset, adapter, batches)
    alone_mib = _largest_alone_mib(adapter, options)
    with EncoderCudaGraphManager(adapter, options.config) as manager:
        capture = _capture_cost(manager, alone_mib)
        ways = _Ways(adapter, stock, manager, options)
        rows = tuple(ways.row(shape, roofline, references.get(shape.name)) for shape in batches)
    result = ModelResult(
        preset=preset.name,
        checkpoint=preset.checkpoint,
        assumed=preset.assumed,
        weight_mib=weight_bytes(adapter) / 2**20,
        plain_attention=str(getattr(adapter.model, adapter.parts[0]).config._attn_implementation),
        capture=capture,
        rows=rows,
    )
    del adapter, stock, manager, ways, references
    _free(options.device)
    return result


def _build(preset: Preset, options: Options) -> tuple[Adapter[Any], Any]:
    """Ours, and a stock model of its own with the same weights: rewrites change how ours stores them."""
    parts = adapter_class(preset.model_type).parts
    model = vision_model(hf_config(preset), device=options.device, dtype=options.dtype, parts=parts)
    random_weights_(model, parts)
    stock = copy.deepcopy(model)
    return adapter_for(model, options.config), stock


class _Ways:
    """The three ways of one model."""

    def __init__(
        self, adapter: Adapter[Any], stock: Any, manager: EncoderCudaGraphManager[Any], options: Options
    ) -> None:
        self._stock_model = stock
        self._adapter, self._manager, self._options = adapter, manager, options
        self._uncaptured = EncoderCudaGraphManager(adapter, options.config)

    def row(self, shape: Shape, roofline: Roofline, reference: Tensor | None) -> Row:
        """Measure one batch."""
        on_cpu = processor_outputs(self._adapter, shape, self._options.dtype)
        resident = with_pixels_on(on_cpu, self._options.device, self._options.dtype)
        plan = self._manager.plan(self._adapter.batch(**on_cpu))
        flops, tokens = encoder_flops(self._adapter, shape.grids), num_tokens(self._adapter, shape)
        plain_inputs = self._for_stock(on_cpu)
        row = Row(
            batch=shape.name,
            items=len(shape.items),
            tokens=tokens,
            step=_step(plan),
            padding_fraction=_padding_fraction(plan),
            flops=flops,
            limit_ms=roofline.limit_ms(flops, weight_bytes(self._adapter)),
            plain=self._plain_cost(plain_inputs, on_cpu),
            eager=self._our_cost(self._uncaptured, resident, on_cpu),
            ours=self._our_cost(self._manager, resident, on_cpu),
            error_ours=_error(torch.cat(self._encode(self._manager, resident)), reference),
            error_plain=_error(stock_rows(self._stock(plain_inputs)), reference),
        )
        _say_row(row)
        return row

    def _plain_cost(self, inputs: Inputs, on_cpu: Inputs) -> Cost:
        resident = self._time(lambda: self._stock(inputs), f"{PLAIN_INSIDE}; {RESIDENT}, grids on the device too")
        return Cost(
            resident,
            self._time_from_host(lambda: self._stock(self._for_stock(on_cpu)), f"{PLAIN_FROM_HOST}; {PLAIN_INSIDE}"),
        )

    def _our_cost(self, manager: EncoderCudaGraphManager[Any], resident: Inputs, on_cpu: Inputs) -> Cost:
        return Cost(
            self._time(lambda: self._encode(manager, resident), f"{OURS_INSIDE}; {RESIDENT}, grids on the CPU"),
            self._time_from_host(lambda: self._encode(manager, on_cpu), f"{OURS_INSIDE}; {OURS_FROM_HOST}"),
        )

    def _for_stock(self, inputs: Inputs) -> Inputs:
        return for_stock_method(inputs, self._options.device, self._options.dtype)

    def _stock(self, inputs: Inputs) -> Any:
        return self._stock_model.get_image_features(**inputs)

    def _encode(self, manager: EncoderCudaGraphManager[Any], inputs: Inputs) -> list[Tensor]:
        return manager.encode(self._adapter.batch(**inputs))

    def _time(self, call: Callable[[], object], inside: str) -> Timing:
        return self._measure(call, inside, self._options.seconds)

    def _time_from_host(self, call: Callable[[], object], inside: str) -> Timing | None:
        """In half the time: host times spread less."""
        on_cpu = self._options.device.type == "cpu"
        return None if on_cpu else self._measure(call, inside, self._options.seconds / 2)

    def _measure(self, call: Callable[[], object], inside: str, seconds: float) -> Timing:
        return measure(call, self._options.device, inside=inside, repeats=self._options.repeats, seconds=seconds)


def stock_rows(output: Any) -> Tensor:
    """The features of a stock method, `(tokens, hidden)`, whichever form the model returns."""
    features = output.pooler_output
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))


def _step(plan: Plan) -> str:
    described = []
    for step in plan.steps.values():
        match step:
            case Replay(capacity):
                described.append(f"replay {capacity.tokens:,}")
            case Eager(reason):
                described.append(f"eager: {reason.value}")
    return "; ".join(described)


def _padding_fraction(plan: Plan) -> float | None:
    replays = [
        (step.capacity.tokens, plan.demands[path].tokens)
        for path, step in plan.steps.items()
        if isinstance(step, Replay)
    ]
    rows = sum(budget for budget, _ in replays)
    return 1 - sum(tokens for _, tokens in replays) / rows if rows else None


def _error(rows: Tensor, reference: Tensor | None) -> float | None:
    """Relative norm of the difference."""
    if reference is None:
        return None
    return float((rows.float() - reference).norm() / reference.norm())


def _references(preset: Preset, adapter: Adapter[Any], batches: Sequence[Shape]) -> dict[str, Tensor]:
    """What plain transformers gives in float32, by batch; the copy of the weights is gone afterwards."""
    twin = vision_model(hf_config(preset), device=adapter.device, dtype=torch.float32, parts=adapter.parts)
    twin.load_state_dict(adapter.model.state_dict())
    found = {}
    with _without_tf32():
        for shape in batches:
            if num_tokens(adapter, shape) <= REFERENCE_TOKENS:
                inputs = processor_outputs(adapter, shape, adapter.dtype)
                output = twin.get_image_features(**for_stock_method(inputs, adapter.device, torch.float32))
                found[shape.name] = stock_rows(output)
    del twin
    _free(adapter.device)
    return found


@contextmanager
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _largest_alone_mib(adapter: Adapter[Any], options: Options) -> float:
    """Static buffers and pool of a manager that captures the largest budget and no other."""
    (path,) = adapter.paths()
    largest = adapter.capacities(path, options.config)[-1].tokens
    with EncoderCudaGraphManager(adapter, EncoderCudaGraphConfig(token_budgets=(largest,))) as manager:
        report = manager.capture()
    return (report.static_bytes + report.pool_bytes) / 2**20


def _capture_cost(manager: EncoderCudaGraphManager[Any], largest_alone_mib: float) -> CaptureCost:
    report = manager.capture()
    budgets = [budget for levels in report.budgets.values() for budget in levels]
    return CaptureCost(
        backend=report.backend,
        budgets=len(budgets),
        largest=max(budgets, default=0),
        dropped=sum(map(len, report.dropped.values())),
        seconds=report.seconds,
        static_mib=report.static_bytes / 2**20,
        pool_mib=report.pool_bytes / 2**20,
        largest_alone_mib=largest_alone_mib,
    )


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _say_row(row: Row) -> None:
    times = ", ".join(
        f"{name} {number(cost.resident.best_ms.median)} ms"
        for name, cost in (("plain", row.plain), ("eager", row.eager), ("ours", row.ours))
    )
    _say(f"  {row.batch}: {times} ({row.step})")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> Result:
    """Run, print the page, and write or print the JSON."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("onereplay").setLevel(logging.INFO)
    result = run(options, " ".join(["python -m benchmarks.bench_one_replay", *given]))
    text = page(result)
    print(text)
    if options.out is None:
        print(json.dumps(asdict(result)))
    else:
        for path in write(options.out, "one_replay", result.card, asdict(result), text):
            _say(f"wrote {path}")
    return result


def _parse(arguments: Sequence[str]) -> Options:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="bench_one_replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presets", nargs="+", default=PRESETS, help="names of onereplay.presets, NAME or NAME@tiny")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="tokens of the batches")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if on_gpu else "cpu"))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="bfloat16, on a CPU float32")
    parser.add_argument("--repeats", type=int, default=50, help="counted calls at most")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of the counted calls, at least five of them")
    parser.add_argument("--max-token-budget", type=_budget, default=DEFAULT_MAX_TOKEN_BUDGET, help="a number, or none")
    parser.add_argument("--commit", help="what the card names, for a copy of the sources without git")
    parser.add_argument("--out", type=Path, help="directory for the JSON and the page; without it the JSON is printed")
    given = parser.parse_args(arguments)
    if min(*given.tokens, given.repeats) < 1:
        parser.error("--tokens and --repeats must be positive")
    dtype = given.dtype or ("float32" if given.device.type == "cpu" else "bfloat16")
    return Options(
        presets=tuple(given.presets),
        tokens=tuple(given.tokens),
        device=given.device,
        dtype=getattr(torch, dtype),
        repeats=given.repeats,
        seconds=given.seconds,
        max_token_budget=given.max_token_budget,
        commit=given.commit,
        out=given.out,
    )


def _budget(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


if __name__ == "__main__":
    main()
