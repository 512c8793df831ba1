"""The self-test behind `onereplay check`: replay against eager against plain transformers, on the same weights.

Plain transformers is the stock `get_image_features` / `get_video_features` of the very modules that the encoder uses.
The tolerance, by dtype:

* float32: 1e-5 of the largest reference value. Both sides compute the same sums in another order; fp32 rounds at 6e-8,
  and some hundred layers of sums stay below 1e-5.
* bfloat16, float16: the relative error (norm) against a float32 copy of the model is at most 1.1 times that of plain
  transformers in the same dtype. Rounding in another order gives another error of the same size; 1.1 leaves room for
  chance, and a wrong row does not fit in it. The errors of few values (one embedding of an image, say) are no measure,
  so a batch of few is judged with others of its sizes: over `ENOUGH_VALUES` in all.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onereplay.adapters.base import Adapter
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.budgets import MAX_BATCH_TOKENS
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Eager, Plan, Reason, Replay
from onereplay.encoder import Encoder, planner
from onereplay.geometry import Grid

FP32_TOLERANCE = 1e-5
HALF_RATIO = 1.1
ENOUGH_VALUES = 8192
"""Errors in half precision are compared over at least so many values, of several random batches where one has fewer:
the ratio of two errors of chance is near 1 only over many."""
MOST_BATCHES = 32
SMALL_BUDGETS = (64, 80, 128, 256)
LARGE_BUDGETS = (64, 256, 1024, 5120)
OWNERSHIP_BATCHES = 20
FEW_ITEMS = 8
"""The bound on items for models of large tiles: one more than the bound is encoded, in float32 too."""


@dataclass(frozen=True)
class CheckResult:
    """One claim and whether it held."""

    claim: str
    passed: bool
    detail: str


def check_model(
    spec: str,
    *,
    backend: str = "auto",
    device: str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    budgets: Sequence[int] | None = None,
    attention: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> list[CheckResult]:
    """Run every check of a model.

    Args:
        spec: a hub id, a directory, `preset:NAME` or `preset:NAME@tiny`.
        backend: `traced`, `cuda` or `auto`.
        device: where; CUDA if there is any by default.
        dtype: of the encoder; bfloat16 on CUDA and float32 elsewhere by default.
        seed: of the random pixels (and of a preset's weights).
        budgets: token budgets to capture; by default four small ones on the CPU and up to 5,120 on CUDA.
        attention: an attention back end.
        progress: called with each claim before it is checked.

    Returns:
        One result a claim.

    Raises:
        OnereplayError: the model cannot be loaded or the options are refused; a failing claim does not raise.
    """
    on_cuda = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type == "cuda"
    config = EncoderCudaGraphConfig(
        token_budgets=tuple(budgets or (LARGE_BUDGETS if on_cuda else SMALL_BUDGETS)),
        backend="traced" if backend == "auto" and not on_cuda else backend,
        attention=attention,
    )
    adapter = planner(spec, config)[0].adapter
    if max(map(adapter.unit, adapter.paths())) * (config.items_bound + 1) > MAX_BATCH_TOKENS:
        config = dataclasses.replace(config, max_items_per_batch=FEW_ITEMS)
    options: dict[str, Any] = {"seed": seed} if spec.startswith("preset:") else {}
    with Encoder.from_spec(spec, device=device, dtype=dtype, config=config, **options) as encoder:
        return list(Checks(encoder, seed).run(progress or (lambda claim: None)))


@dataclass
class Checks:
    """The checks of one encoder."""

    encoder: Encoder
    seed: int = 0
    manager: EncoderCudaGraphManager[Any] = field(init=False)
    adapter: Adapter[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.manager, self.adapter = self.encoder.manager, self.encoder.adapter
        self.eager = EncoderCudaGraphManager(self.adapter, self.manager.config)
        """Never captured: every batch of it is an eager forward."""
        self.generator = torch.Generator(self.manager.device).manual_seed(self.seed)
        self._exact = self._exact_copy()

    def run(self, progress: Callable[[str], None]) -> Iterator[CheckResult]:
        """Every claim, in order; a claim that raises fails with the error."""
        for claim, check in self._claims():
            progress(claim)
            try:
                passed, detail = check()
            except Exception as error:  # a claim that raises is a claim that failed; the others still count
                passed, detail = False, f"{type(error).__name__}: {error}"
            yield CheckResult(claim, passed, detail)

    def _claims(self) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
        for path in self.adapter.paths():
            yield from self._claims_of(path)
        yield "more items than the bound are one eager forward", self._too_many_items
        yield "pixels of NaN in one batch leave no trace in the next", self._nan_leaves_no_trace
        yield "poisoned static buffers do not show", self._poison_does_not_show
        yield f"a result survives {OWNERSHIP_BATCHES} later batches bit for bit", self._results_are_owned
        yield "the same batch gives the same bits again", self._repeats

    def _claims_of(self, path: str) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
        """Both edges of every budget of a path, and one batch beyond the largest."""
        where = "" if len(self.adapter.paths()) == 1 else f"path {path}: "
        ladder, unit = self.manager.capacities[path], self.adapter.unit(path)
        wanted = self.adapter.capacities(path, self.manager.config)
        yield f"{where}all {len(wanted)} budgets are captured", lambda: (len(ladder) == len(wanted), self._captured())
        below = 0
        for capacity in ladder:
            edges = (("lower edge", below + unit), ("upper edge", capacity.tokens))
            for edge, tokens in edges:
                for name, grids in self.adapter.layouts(path, tokens, capacity.items):
                    claim = f"{where}budget {capacity.tokens}, {edge} ({tokens} tokens), {name}"
                    yield claim, functools.partial(self._agrees, path, grids, capacity.tokens)
            below = capacity.tokens
        over = below + unit
        for name, grids in self.adapter.layouts(path, over, 2)[:1]:
            claim = f"{where}over the largest budget ({over} tokens), {name}"
            yield claim, functools.partial(self._is_one_eager, path, grids)

    @property
    def _path(self) -> str:
        """The first path, which every item uses."""
        return next(iter(self.adapter.paths()))

    def _captured(self) -> str:
        report = self.manager.report().capture
        return f"{report}"

    # ------------------------------------------------------------------ the three ways

    def _inputs(self, grids: Sequence[Grid], *, grouped: bool = True) -> dict[str, Any]:
        """Random pixels; tiles are grouped into items of three and one, unless every tile is to be an item."""
        inputs: dict[str, Any] = dict(self.adapter.example_inputs(grids, self.generator))
        names = getattr(self.adapter, "size_names", ()) if grouped else ()
        if names:
            groups, rest = divmod(len(grids), 4)
            counts = "num_patches" if "num_patches" in names else names[0]
            inputs[counts] = [3, 1] * groups + [1] * rest
        return inputs

    def _replay(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Plan]:
        batch = self.adapter.batch(**inputs)
        return torch.cat(self.manager.encode(batch)), self.manager.plan(batch)

    def _plain(self, inputs: Mapping[str, Any]) -> Tensor:
        return plain_features(self.adapter, self.adapter.model, inputs)

    def _reference(self, inputs: Mapping[str, Any]) -> Tensor:
        with exact_products():
            return plain_features(self.adapter, self._exact, inputs)

    def _exact_copy(self) -> Any:
        """The model in float32; the model itself where it is."""
        if self.manager.dtype == torch.float32:
            return self.adapter.model
        return copy.deepcopy(self.adapter.model).float()

    def _samples(
        self, inputs: Mapping[str, Any], grids: Sequence[Grid], values: int, *, grouped: bool = True
    ) -> list[Mapping[str, Any]]:
        """These inputs, and in half precision others of the same sizes until there are values enough."""
        wanted = 1 if self.manager.dtype == torch.float32 else min(-(-ENOUGH_VALUES // values), MOST_BATCHES)
        return [inputs, *(self._inputs(grids, grouped=grouped) for _ in range(wanted - 1))]

    def _truth(self, samples: Sequence[Mapping[str, Any]]) -> "_Truth":
        reference = torch.cat([self._reference(inputs) for inputs in samples]).double()
        if self.manager.dtype == torch.float32:
            return _Truth(reference, None)
        return _Truth(reference, torch.cat([self._plain(inputs) for inputs in samples]).double())

    # ------------------------------------------------------------------ claims

    def _agrees(self, path: str, grids: Sequence[Grid], budget: int) -> tuple[bool, str]:
        """One replay of this budget, as right as plain transformers; the eager forward too."""
        inputs = self._inputs(grids)
        found, steps = self._replay(inputs)
        step = steps.steps[path]
        if not isinstance(step, Replay) or step.capacity.tokens != budget:
            return False, f"expected one replay of {budget}, got {steps}"
        samples = self._samples(inputs, grids, found.numel())
        truth = self._truth(samples)
        replayed = torch.cat([found, *(self._replay(other)[0] for other in samples[1:])])
        eager = torch.cat([rows for one in samples for rows in self.eager.encode(self.adapter.batch(**one))])
        (right, words), (eager_right, eager_words) = truth.judge(replayed), truth.judge(eager)
        return right and eager_right, words if eager_right else f"{words}; eager: {eager_words}"

    def _is_one_eager(self, path: str, grids: Sequence[Grid], *, grouped: bool = True) -> tuple[bool, str]:
        inputs = self._inputs(grids, grouped=grouped)
        before = self.manager.report()
        found, steps = self._replay(inputs)
        after = self.manager.report()
        step = steps.steps[path]
        once = sum(after.eager[path].values()) - sum(before.eager[path].values()) == 1
        samples = self._samples(inputs, grids, found.numel(), grouped=grouped)
        right, words = self._truth(samples).judge(
            torch.cat([found, *(self._replay(other)[0] for other in samples[1:])])
        )
        return right and once and isinstance(step, Eager) and after.replays.get(path) == before.replays.get(
            path
        ), f"{steps}; {words}"

    def _too_many_items(self) -> tuple[bool, str]:
        bound = self.manager.config.items_bound
        passed, words = self._is_one_eager(self._path, [self._smallest()] * (bound + 1), grouped=False)
        return passed and Reason.TOO_MANY_ITEMS.value in words, words

    def _nan_leaves_no_trace(self) -> tuple[bool, str]:
        capacity = self.manager.capacities[self._path][-1]
        poison = self._inputs(self._layouts(capacity.tokens, capacity.items)[0][1])
        self._replay({name: _not_a_number(value) for name, value in poison.items()})
        below = [other.tokens for other in self.manager.capacities[self._path][:-1]][-1:]
        return self._agrees(self._path, self._fewest_above(sum(below), capacity.items), capacity.tokens)

    def _poison_does_not_show(self) -> tuple[bool, str]:
        self.manager.poison()
        capacity = self.manager.capacities[self._path][0]
        return self._agrees(self._path, [self._smallest()], capacity.tokens)

    def _results_are_owned(self) -> tuple[bool, str]:
        tokens = self.manager.capacities[self._path][0].tokens
        name, grids = self._layouts(tokens, 1)[0]
        kept = self.manager.encode(self.adapter.batch(**self._inputs(grids)))
        copies = [rows.clone() for rows in kept]
        for _ in range(OWNERSHIP_BATCHES):
            self._replay(self._inputs(grids))
        same = all(torch.equal(rows, before) for rows, before in zip(kept, copies, strict=True))
        apart = not any(self.manager.owns(rows) for rows in kept)
        return same and apart, f"{name}: {'unchanged' if same else 'changed'}, {'own' if apart else 'static'} memory"

    def _repeats(self) -> tuple[bool, str]:
        inputs = self._inputs(self._layouts(self.manager.capacities[self._path][0].tokens, 8)[-1][1])
        first, second = self._replay(inputs)[0], self._replay(inputs)[0]
        return torch.equal(first, second), f"{len(first)} rows"

    def _layouts(self, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        return self.adapter.layouts(self._path, tokens, max_items)

    def _smallest(self) -> Grid:
        return self._fewest_above(0, 1)[0]

    def _fewest_above(self, tokens: int, max_items: int) -> list[Grid]:
        """The first batch of more tokens that there is: a model may have none of a single tile."""
        unit = self.adapter.unit(self._path)
        sized = (self._layouts(tokens + count * unit, max_items) for count in itertools.count(1))
        return next(found[0][1] for found in sized if found)


@dataclass(frozen=True)
class _Truth:
    """What some batches should give."""

    reference: Tensor
    """In float32, kept as float64."""
    plain: Tensor | None
    """Plain transformers in the encoder's half-precision dtype."""

    def judge(self, found: Tensor) -> tuple[bool, str]:
        """Whether `found` is as near to the reference as the module's rule asks, in words."""
        if found.shape != self.reference.shape:
            return False, f"shape {tuple(found.shape)}, plain transformers gives {tuple(self.reference.shape)}"
        if self.plain is None:
            scale = self.reference.abs().max().clamp(min=1)
            error = float((found.double() - self.reference).abs().max() / scale)
            return error <= FP32_TOLERANCE, f"error {error:.1e} <= {FP32_TOLERANCE:.0e}"
        ours, plain = (_relative(rows.double(), self.reference) for rows in (found, self.plain))
        return (
            ours <= HALF_RATIO * plain,
            f"error {ours:.2e}, plain {plain:.2e}, ratio {ours / plain:.3f} <= {HALF_RATIO}",
        )


def plain_features(adapter: Adapter[Any], model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """All rows that the stock entry points give, in the order of the adapter's batch: `(tokens, hidden)`."""
    with torch.no_grad():
        parts = adapter.stock_features(model, inputs)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _not_a_number(value: Any) -> Any:
    """NaN in place of every pixel; sizes as they are."""
    return torch.full_like(value, torch.nan) if isinstance(value, Tensor) and value.is_floating_point() else value


def _relative(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Float32 products in full float32 inside the block, without TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
