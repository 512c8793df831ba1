"""The ways to encode a batch that `onereplay bench` compares, on the same weights and the same pixels.

plain             the stock feature methods, as transformers loads the model (sdpa)
varlen            the same with this project's variable-length attention in place of sdpa
compile           `torch.compile` of the stock feature methods
reduce-overhead   the same with `mode="reduce-overhead"`: PyTorch's own CUDA graphs
eager             this project's forward without a graph
replay            this project's rule: one replay, or one eager forward
half-octave       an earlier rule on the same captured kernels: 25 budgets to 16,384, greedy packing, several replays
power-of-two      an earlier rule on the same captured kernels: 9 budgets to 16,384, greedy packing

For the first four grids and pixels lie on the device before the clock starts; for the others pixels do, and grids lie
on the CPU. In the clock is everything from the call to features: plan, metadata, copies, forward or replays, split.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onereplay.adapters.base import Adapter, share_weights
from onereplay.attention.interface import use_varlen
from onereplay.bench.dispatch import (
    Rule,
    half_octave_budgets,
    half_octave_rule,
    power_of_two_budgets,
    power_of_two_rule,
)
from onereplay.bench.inputs import Inputs, Shape, processor_outputs, with_pixels_on
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.stats import CaptureReport

Call = Callable[[], Sequence[Tensor]]
STOCK_WAYS = ("plain", "varlen", "compile", "reduce-overhead")
RULES: Mapping[str, tuple[Rule, Callable[[], tuple[int, ...]]]] = {
    "half-octave": (half_octave_rule, half_octave_budgets),
    "power-of-two": (power_of_two_rule, power_of_two_budgets),
}
WAYS = (*STOCK_WAYS, "eager", "replay", *RULES)
DEFAULT_WAYS = ("plain", "eager", "replay")


@dataclass(frozen=True, slots=True)
class Prepared:
    """One batch, ready for every way."""

    shape: Shape
    on_cpu: Inputs
    resident: Inputs
    """Pixels on the device in the model's dtype."""
    stock: Inputs
    """Sizes on the device too."""

    @classmethod
    def of(cls, adapter: Adapter[Any], shape: Shape) -> "Prepared":
        """Random pixels from a fixed seed."""
        device, dtype = adapter.device, adapter.dtype
        on_cpu = processor_outputs(adapter, shape, dtype)
        resident = with_pixels_on(on_cpu, device, dtype)
        stock = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in resident.items()}
        return cls(shape, on_cpu, resident, stock)


class Ways:
    """The ways of one model, each made when it is first asked for.

    Args:
        adapter: with the rewrites that are to be measured.
        config: of `replay`; the rules of before take its `max_items_per_batch`.
    """

    def __init__(self, adapter: Adapter[Any], config: EncoderCudaGraphConfig) -> None:
        self.adapter, self.config = adapter, config
        self._stock_model = copy.deepcopy(adapter.model)
        """With weights of its own: rewrites change how ours are stored."""
        self._managers: dict[str, EncoderCudaGraphManager[Any]] = {}
        self._compiled: dict[str, Any] = {}

    def manager(self, way: str) -> EncoderCudaGraphManager[Any]:
        """The manager of one of our ways, captured (but for `eager`)."""
        if way not in self._managers:
            config = self.config
            if way in RULES:
                config = self._config_of(RULES[way][1]())
            self._managers[way] = EncoderCudaGraphManager(self.adapter, config)
            if way != "eager":
                self._managers[way].capture()
        return self._managers[way]

    def capture_report(self) -> CaptureReport:
        """What capturing the budgets of `replay` took."""
        return self.manager("replay").report().capture

    def why_not(self, way: str) -> str:
        """Why a way cannot be measured with this model; empty if it can."""
        if way == "varlen" and self.adapter.engine != "tiles" and not self._tower_passes_offsets():
            return "the stock tower hands no offsets to its attention"
        return ""

    def call(self, way: str, batch: Prepared) -> Call:
        """What is timed."""
        if way in STOCK_WAYS:
            return self._stock(way, batch)
        manager = self.manager(way)
        if way in RULES:
            return self._by_rule(manager, RULES[way][0], batch.resident)
        return lambda: manager.encode(self.adapter.batch(**batch.resident))

    def from_host(self, batch: Prepared) -> Call:
        """`replay` of pixels that lie on the CPU in float32, as processors leave them."""
        manager = self.manager("replay")
        return lambda: manager.encode(self.adapter.batch(**batch.on_cpu))

    def _by_rule(self, manager: EncoderCudaGraphManager[Any], rule: Rule, inputs: Inputs) -> Call:
        def run() -> list[Tensor]:
            batch = self.adapter.batch(**inputs)
            sizes = [item.num_tokens for item in batch.items]
            parts = rule(sizes, self.config.items_bound)
            found: list[Tensor] = []
            for part in parts:
                found += manager.encode(self.adapter.select(batch, part.items))
            return found

        return run

    def _config_of(self, budgets: tuple[int, ...]) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            token_budgets=budgets,
            max_items_per_batch=self.config.max_items_per_batch,
            max_frames_per_batch=self.config.max_frames_per_batch,
            attention=self.config.attention,
            backend=self.config.backend,
            optimize=self.config.optimize,
        )

    def _stock(self, way: str, batch: Prepared) -> Call:
        model = self._stock_of(way)

        def run() -> list[Tensor]:
            with torch.no_grad(), self._attention(way):
                return self.adapter.stock_features(model, batch.stock)

        return run

    def _stock_of(self, way: str) -> Any:
        """The stock model; for the ways of `torch.compile` a copy that shares its weights, entry points compiled."""
        if way not in ("compile", "reduce-overhead"):
            return self._stock_model
        if way not in self._compiled:
            model = share_weights(self._stock_model)
            for name in self.adapter.entry_points:
                path, _, leaf = name.rpartition(".")
                owner = model.get_submodule(path)
                mode = None if way == "compile" else way
                setattr(owner, leaf, torch.compile(getattr(owner, leaf), mode=mode))
            self._compiled[way] = model
        return self._compiled[way]

    def _attention(self, way: str) -> Any:
        if way != "varlen":
            return nullcontext()
        tower = getattr(self._stock_model, self.adapter.parts[0])
        return use_varlen(tower.config, self.config.attention, tiles=self.adapter.engine == "tiles")

    def _tower_passes_offsets(self) -> bool:
        return "image_grid_thw" in next(iter(self.adapter.entry_points.values()))

    def close(self) -> None:
        """Give the graphs back."""
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()
        self.adapter.rewritten.restore()
