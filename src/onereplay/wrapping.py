"""Any module that maps a batch to a batch, under graphs.

    fast = wrap(model.eval(), torch.randn(1, 3, 224, 224, device="cuda"))
    features = fast(images)        # one replay, or one eager forward
    fast.close()

The rule is that of the encoders: a batch is one replay of the smallest captured batch size that holds it, or one eager
forward. The engine is that of tiles, where a tile is a row of the batch and a row is one token: sizes 1 to 16 exactly,
then the grid of `core.budgets`, up to `max_items_per_batch`.

Padding rows keep what an earlier batch left in them, so a row's result must depend on that row alone. `wrap` tests that
and refuses a module where it does not hold (attention across the batch, a mean over it, a division by its size).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onereplay.adapters.base import WHOLE
from onereplay.adapters.tiles import TileAdapter, TileBatch
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core import budgets
from onereplay.core.buffers import Buffers, Output
from onereplay.core.graphs import CaptureGuard, backend_name
from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Capacity, Reason
from onereplay.core.stats import Report
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.optimize import choose

TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative error (norm) between the same rows in batches of two sizes: other sizes run through other kernels, in TF32
where the user allows it."""
HALF_TOLERANCE = 5e-2
"""The same for 8 to 11 bits of mantissa; a result that depends on the size of the batch is off by more."""


class WrappedModule(TileAdapter):
    """The adapter of a user's module: a row of the batch is an item, a tile, a sequence, a patch and a token.

    Args:
        module: in eval mode, on its device.
        example: a batch of the shape, dtype and device that will come.
        rewrites: of `onereplay.optimize`.
    """

    model_type = "module"
    parts = (WHOLE,)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    modalities = (Modality.IMAGE,)
    path = "module"
    tile_tokens = 1
    hidden_size = 0

    def __init__(self, module: nn.Module, example: Tensor, rewrites: Sequence[str] = ()) -> None:
        self._example = example[:1].detach().clone()
        super().__init__(None, module, optimize=rewrites)
        self.results, self.structure = pytree.tree_flatten(_run(self.own.tower, example))

    @property
    def device(self) -> torch.device:
        """Of the module's weights; of the example where there are none."""
        return next((weight.device for weight in self.weights), self._example.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs."""
        return self._example.dtype

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """One row of the example."""
        return tuple(self._example.shape[1:])

    def tokens_of(self, height: int, width: int) -> int:
        """A row is a token."""
        return 1

    def patches_of(self, height: int, width: int) -> int:
        """A row is a patch."""
        return 1

    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """Batch sizes: the user's own, or 1 to 16 and the grid up to the bound on items."""
        if config.token_budgets is not None:
            sizes: Sequence[int] = config.token_budgets
        else:
            most = min(config.items_bound, config.max_token_budget or config.items_bound)
            above = (size for size in budgets.token_budgets(1, most) if size > budgets.EXACT_TILES)
            sizes = (*range(1, min(budgets.EXACT_TILES, most) + 1), *above)
        return [Capacity(size, size, size, size, longest=1) for size in sizes]

    def outputs(self) -> tuple[Output, ...]:
        """What the module gave for the example."""
        return tuple(
            Output(f"result_{place}", "sequences", tuple(result.shape[1:]), result.dtype)
            for place, result in enumerate(self.results)
        )

    def rows(self, batch: Tensor) -> TileBatch:
        """A batch of rows; rows of another shape than the example's run eagerly."""
        shape = tuple(batch.shape[1:])
        why = "" if shape == self.tile_shape else f"rows of {shape}, captured for {self.tile_shape}"
        row = Item(Modality.IMAGE, {self.path: PathSize(1, 1, 1, longest=1)}, why)
        return TileBatch((row,) * len(batch), (batch,))

    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """Rows do not see each other."""
        return [(f"{tokens} rows", [Grid(1, 1, 1)] * tokens)]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The module's own forward; its results one behind the other."""
        results, _ = pytree.tree_flatten(self.own.tower(buffers.pixels))
        return results

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: TileBatch) -> list[Tensor]:
        """The results of the whole batch, in the module's order."""
        return list(rows[self.path])

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """In the structure that the module gave for the example."""
        return pytree.tree_unflatten(list(features), self.structure)

    def nothing(self) -> list[Tensor]:
        """The results of an empty batch."""
        return [result.new_empty((0, *result.shape[1:])) for result in self.results]


class Wrapped:
    """A module whose calls are replays; made by `wrap`. Also a context manager that closes it."""

    def __init__(self, module: nn.Module, example: Tensor, config: EncoderCudaGraphConfig) -> None:
        _assert_usable(module, example)
        self.module = module
        """The user's own, as it was."""
        device = next((weight.device for weight in module.parameters()), example.device)
        backend_name(config.backend, device)
        rewrites = choose(config.optimize, device, config.backend) if config.optimize is not None else ()
        with torch.no_grad():
            self.adapter = _adapter(module, example, rewrites)
            self.adapter.configure(config)
            _assert_rows_apart(self.adapter, module, example)
        self.manager: EncoderCudaGraphManager[TileBatch] = EncoderCudaGraphManager(self.adapter, config)
        try:
            self.manager.capture()
            self._assert_replays_agree(example)
        except BaseException:
            self.close()
            raise

    def __call__(self, batch: Tensor) -> Any:
        """The module's result for a batch, in the module's own structure: fresh tensors, the caller's own.

        Args:
            batch: `(N, *shape)`; where it lies and which float type it has do not matter. Rows of another shape than
                the example's are one eager forward. With gradients enabled, a batch that requires them goes to the
                module itself; all other results carry no gradient.

        Raises:
            InputError: not a batch of such rows.
            UnsupportedModelError: the module was put into training mode.
            ClosedError: this was closed, or the module's weights were moved.
        """
        _assert_eval(self.module)
        self._assert_batch(batch)
        if batch.requires_grad and torch.is_grad_enabled():
            self.manager.count_outside(Reason.UNSUPPORTED_INPUT, "the batch asks for gradients")
            return self.module(batch.to(self.adapter.device, self.adapter.dtype))
        results = self.manager.encode(self.adapter.rows(batch.detach())) or self.adapter.nothing()
        return self.adapter.stock_output(results)

    def _assert_batch(self, batch: Any) -> None:
        example = self.adapter.tile_shape
        if not isinstance(batch, Tensor) or batch.ndim != 1 + len(example):
            found = f"shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"
            wanted = ", ".join(map(str, example))
            raise InputError(f"this module was wrapped for batches of shape (N, {wanted}), got {found}")
        if batch.is_floating_point() != self.adapter.dtype.is_floating_point:
            raise InputError(f"this module was wrapped for {self.adapter.dtype}, got {batch.dtype}; convert the batch")

    def _assert_replays_agree(self, example: Tensor) -> None:
        """The smallest graph gives what the module gives for an input that it was not captured on."""
        if not self.manager.capacities[self.adapter.path]:
            raise UnsupportedModelError(
                "no batch size of the module could be captured; the warnings above say why (memory, or operations that "
                "a graph cannot hold)"
            )
        batch = self.adapter.rows(_rows_like(example, 1))
        found = self.manager.encode(batch)
        expected = pytree.tree_leaves(_run(self.module, batch.tiles[0].to(self.adapter.device)))
        if not _agree(found, expected):
            raise UnsupportedModelError(
                "a replay of the module gives other results than the module: its forward takes values from the data, "
                "or from outside of its input, into Python, where a graph freezes them; it cannot be wrapped"
            )

    def report(self) -> Report:
        """Replays, eager forwards by reason, padding and memory so far; a row of a batch counts as one token."""
        return self.manager.report()

    def close(self) -> None:
        """Give back graphs and buffers; the module is as it was. Again: nothing."""
        self.manager.close()
        self.adapter.rewritten.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def wrap(module: nn.Module, example: Tensor, config: EncoderCudaGraphConfig | None = None) -> Wrapped:
    """A callable that runs a module by the one-replay rule: a model of timm or open_clip, or your own.

    Args:
        module: in eval mode, on its device. One batch `(N, ...)` in; a tensor `(N, ...)` out, or a tuple, list or dict
            of such. A row's result must depend on that row alone. It is used in place: weights changed in place count,
            weights that are moved end the wrapping. Forward hooks do not run in replays.
        example: a batch with the shape, dtype and device of those that will come; its N does not matter.
        config: `max_items_per_batch` (64 by default) is the largest batch size that is captured, `token_budgets` are
            batch sizes of your own; a larger batch is one eager forward. `backend` as for encoders. `attention` is the
            module's own. No rewrite is applied unless `optimize` names it.

    Raises:
        InputError: not a module, or the example is no batch.
        UnsupportedModelError: the module trains, gives something else than rows for rows, or its rows depend on other
            rows, on their number, or on values that a graph would freeze.
        CaptureError: its forward does what no graph can hold; names the operation and the line.
        ConfigError: the options do not fit the device.

    Example::

        with wrap(timm_model.eval(), torch.randn(1, 3, 224, 224)) as fast:
            features = fast(images)
            print(fast.report())
    """
    return Wrapped(module, example, config or EncoderCudaGraphConfig())


# ------------------------------------------------------------------ what can be wrapped


def _assert_usable(module: Any, example: Any) -> None:
    if not isinstance(module, nn.Module):
        raise InputError(f"wrap takes a torch.nn.Module, got a {type(module).__name__}")
    if not isinstance(example, Tensor) or example.ndim < 2 or not len(example):
        found = tuple(example.shape) if isinstance(example, Tensor) else f"a {type(example).__name__}"
        raise InputError(f"the example must be a batch (N, ...) of at least one row, got {found}")
    _assert_eval(module)


def _assert_eval(module: nn.Module) -> None:
    training = next((name for name, part in module.named_modules() if part.training), None)
    if training is not None:
        where = f"its part {training!r}" if training else type(module).__name__
        raise UnsupportedModelError(
            f"{where} is in training mode, where dropout and batch norm make rows depend on chance and on each other; "
            f"call .eval() on the module first"
        )


def _adapter(module: nn.Module, example: Tensor, rewrites: Sequence[str]) -> WrappedModule:
    """The adapter, whose copy of the module gave rows for rows."""
    try:
        adapter = WrappedModule(module, example.to(_device_of(module, example)), rewrites)
    except TypeError as error:
        raise UnsupportedModelError(f"{type(module).__name__} cannot be copied or called: {error}") from error
    odd = [type(result).__name__ for result in adapter.results if not isinstance(result, Tensor)]
    if odd or not adapter.results:
        given = f"a {odd[0]} among its results" if odd else "no result"
        raise UnsupportedModelError(
            f"{type(module).__name__} gives {given}; a wrapped module gives tensors: one, or a tuple, list or dict of "
            f"them"
        )
    for result in adapter.results:
        if result.ndim == 0 or len(result) != len(example):
            raise UnsupportedModelError(
                f"{type(module).__name__} gives a result of shape {tuple(result.shape)} for a batch of {len(example)}; "
                f"a wrapped module gives one row a row"
            )
    return adapter


def _device_of(module: nn.Module, example: Tensor) -> torch.device:
    return next((weight.device for weight in module.parameters()), example.device)


def _assert_rows_apart(adapter: WrappedModule, module: nn.Module, example: Tensor) -> None:
    """Compare rows by themselves with the same rows in front of padding: other values, then NaN.

    The run by themselves is the user's own module, the padded one the adapter's copy under the guard of captures.
    """
    rows = _rows_like(example, 2).to(adapter.device)
    expected = pytree.tree_leaves(_run(module, rows))
    paddings = [rows.roll(1, 0)[:1]]
    if rows.is_floating_point():
        paddings.append(torch.full_like(rows[:1], torch.nan))
    for padding in paddings:
        with CaptureGuard():
            padded = pytree.tree_leaves(adapter.own.tower(torch.cat([rows, padding])))
        fitting = all(isinstance(each, Tensor) and each.ndim and len(each) == 3 for each in padded)
        if not fitting or not _agree([result[:2] for result in padded], expected):
            raise UnsupportedModelError(
                f"{type(module).__name__} gives other results for the same two rows when a third comes along: its rows "
                f"depend on other rows or on their number (or a forward hook changes them), so padding a batch would "
                f"change its results; it cannot be wrapped"
            )


def _rows_like(example: Tensor, number: int) -> Tensor:
    """Rows of the example, repeated as often as it takes, each shifted along its last side so that they differ."""
    rows = [example[place % len(example)].roll(place, -1) for place in range(number)]
    return torch.stack(rows).detach()


def _run(module: nn.Module, batch: Tensor) -> Any:
    with torch.no_grad(), torch.autocast(batch.device.type, enabled=False):
        return module(batch)


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether results are equal up to rounding in another order."""
    return len(found) == len(expected) and all(
        _close(one.to(other.device), other) for one, other in zip(found, expected, strict=True)
    )


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    allowed = TOLERANCE.get(expected.dtype, HALF_TOLERANCE)
    both = found.double(), expected.double()
    return bool((both[0] - both[1]).norm() <= allowed * both[1].norm().clamp(min=torch.finfo(torch.float32).tiny))
