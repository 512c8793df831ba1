"""`wrap`: any module that maps rows to rows is replayed by the rule, and what cannot be is refused.

Tolerance: 1e-5 of the largest value. A padded batch runs through other kernels than the batch alone; the sums are the
same in another order.
"""

import collections
import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

from onereplay import EncoderCudaGraphConfig, Wrapped, wrap
from onereplay.core.plan import Reason
from onereplay.errors import CaptureError, ClosedError, ConfigError, InputError, UnsupportedModelError
from onereplay.presets import get_preset, hf_config

Pair = collections.namedtuple("Pair", ["first", "second"])


class Net(nn.Module):
    """A convolution, a norm that keeps statistics, and a head; what it gives is made by `shape`."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Any] = lambda rows, pooled: pooled) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.norm.running_mean = torch.randn(8)
        self.shape = shape

    def forward(self, pixels: Tensor) -> Any:
        rows = self.norm(self.conv(pixels)).relu().flatten(2).mT
        return self.shape(rows, self.head(rows.mean(1)))


def images(number: int, side: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(seed))


def wrapped(module: nn.Module, **options: Any) -> Wrapped:
    return wrap(module.eval(), images(2), EncoderCudaGraphConfig(**options))


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


# ------------------------------------------------------------------ the rule


@pytest.mark.parametrize("backend", ["auto", "traced"])
def test_1_to_16_rows_replay_exactly_then_the_grid_and_over_the_cap_is_one_eager_forward(backend: str) -> None:
    module = Net().eval()
    with wrapped(module, backend=backend, max_items_per_batch=32) as fast, torch.no_grad():
        assert fast.report().capture.budgets == {"module": (*range(1, 17), 20, 24, 28, 32)}
        before = fast.report().replays["module"].get(1, 0)
        for number in (1, 7, 16, 17, 32, 33):
            assert close(fast(images(number)), module(images(number)))
        report = fast.report()
        counts = dict(report.replays["module"])
        counts[1] -= before
        assert counts == {1: 1, 7: 1, 16: 1, 20: 1, 32: 1}
        assert report.eager == {"module": {Reason.TOO_MANY_ITEMS.value: 1}}
        assert report.padding_tokens == 3


def test_batch_sizes_of_ones_own() -> None:
    with wrapped(Net(), token_budgets=(4, 8)) as fast:
        fast(images(3))
        assert fast.report().capture.budgets == {"module": (4, 8)}
        assert fast.report().replays["module"][4] >= 1


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (lambda rows, pooled: pooled, Tensor),
        (lambda rows, pooled: (rows, pooled), tuple),
        (lambda rows, pooled: [pooled], list),
        (lambda rows, pooled: {"rows": rows, "pooled": pooled}, dict),
        (lambda rows, pooled: Pair(pooled, rows), Pair),
        (lambda rows, pooled: {"both": (rows, pooled), "class": pooled.argmax(-1)}, dict),
    ],
)
def test_results_keep_their_structure_shapes_and_types(shape: Callable[[Tensor, Tensor], Any], kind: type) -> None:
    module = Net(shape).eval()
    with wrapped(module) as fast, torch.no_grad():
        for number in (0, 3, 17):
            found, expected = fast(images(number)), module(images(number))
            assert type(found) is type(expected) is kind
            leaves = [torch.utils._pytree.tree_leaves(each) for each in (found, expected)]
            for one, other in zip(*leaves, strict=True):
                assert one.dtype == other.dtype
                assert one.shape == other.shape
                assert not number or torch.allclose(one, other, atol=1e-5)


def test_a_stock_tower_gives_its_own_output_type() -> None:
    model = AutoModel.from_config(hf_config(get_preset("dinov2-base@tiny"))).eval()
    pixels = images(3, 56)
    with wrap(model, pixels) as fast, torch.no_grad():
        found, expected = fast(pixels), model(pixels)
        assert type(found) is type(expected)
        assert close(found.last_hidden_state, expected.last_hidden_state)
        assert close(found.pooler_output, expected.pooler_output)


def test_results_are_the_callers_own() -> None:
    with wrapped(Net()) as fast:
        first = fast(images(3))
        kept = first.clone()
        fast(images(3, seed=1)).fill_(torch.nan)
        assert torch.equal(first, kept)
        assert not fast.manager.owns(first)


def test_padding_of_nan_leaves_no_trace() -> None:
    with wrapped(Net()) as fast:
        expected = fast(images(17))
        fast(torch.full((20, 3, 16, 16), torch.nan))
        fast.manager.poison()
        assert torch.equal(fast(images(17)), expected)


# ------------------------------------------------------------------ inputs


def test_rows_of_another_shape_are_one_eager_forward_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    module = Net().eval()
    with wrapped(module) as fast, torch.no_grad(), caplog.at_level(logging.WARNING):
        assert close(fast(images(3, 24)), module(images(3, 24)))
        assert fast.report().eager == {"module": {Reason.UNSUPPORTED_INPUT.value: 1}}
    assert "rows of (3, 24, 24), captured for (3, 16, 16)" in caplog.text


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (torch.zeros(3, 16, 16), r"shape \(N, 3, 16, 16\), got shape \(3, 16, 16\)"),
        ([1.0], "got a list"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.int64), "wrapped for torch.float32, got torch.int64"),
    ],
)
def test_what_is_no_batch_of_such_rows_is_refused(batch: Any, why: str) -> None:
    with wrapped(Net()) as fast, pytest.raises(InputError, match=why):
        fast(batch)


def test_another_float_type_is_cast_and_integers_are_taken_as_integers() -> None:
    with wrapped(Net()) as fast:
        assert torch.equal(fast(images(2).double()), fast(images(2)))
    table = nn.Sequential(nn.Embedding(9, 4), nn.Flatten()).eval()
    ids = torch.arange(12).reshape(4, 3) % 9
    with wrap(table, ids) as fast, torch.no_grad():
        assert torch.equal(fast(ids), table(ids))


def test_a_batch_that_asks_for_gradients_goes_to_the_module_and_others_carry_none() -> None:
    module = Net().eval()
    with wrapped(module) as fast:
        assert not fast(images(2)).requires_grad
        pixels = images(2).requires_grad_()
        fast(pixels).sum().backward()
        assert pixels.grad is not None
        assert fast.report().eager == {"module": {Reason.UNSUPPORTED_INPUT.value: 1}}


# ------------------------------------------------------------------ what cannot be wrapped


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, rows: Tensor) -> Any:
        return self.function(rows)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows - rows.mean(0),
        lambda rows: rows / len(rows),
        lambda rows: rows + rows.flip(0),
        lambda rows: (rows, rows.flip(0).cumsum(0).flip(0)),
        lambda rows: rows.softmax(0),
    ],
)
def test_rows_that_depend_on_others_or_on_their_number_are_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="depend on other rows or on their number"):
        wrap(Function(function).eval(), torch.randn(3, 4))


def test_batch_norm_without_statistics_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="depend on other rows"):
        wrap(nn.BatchNorm1d(4, track_running_stats=False).eval(), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda rows: rows.sum(0), r"shape \(4,\) for a batch of 3"),
        (lambda rows: rows[rows > 0], "for a batch of 3"),
        (lambda rows: (rows, None), "a NoneType among its results"),
        (lambda rows: {}, "no result"),
        (lambda rows: rows.sum(), r"shape \(\)"),
    ],
)
def test_what_is_no_row_a_row_is_refused(function: Callable[[Tensor], Any], why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        wrap(Function(function).eval(), torch.randn(3, 4))


@pytest.mark.parametrize(
    "function", [lambda rows: rows * rows.max().item(), lambda rows: rows + torch.tensor([1.0, 2.0, 3.0, 4.0])]
)
def test_what_no_graph_can_hold_is_named_with_its_line(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"called at .*test_wrapping\.py"):
        wrap(Function(function).eval(), torch.randn(3, 4))


def test_a_value_that_python_changes_between_calls_is_found_frozen() -> None:
    calls = iter(range(1, 10_000))
    with pytest.raises(UnsupportedModelError, match=r"depend on|a graph freezes"):
        wrap(Function(lambda rows: rows * next(calls)).eval(), torch.randn(3, 4))


def test_training_mode_is_refused_when_wrapped_and_when_called_also_of_a_part() -> None:
    module = Net()
    with pytest.raises(UnsupportedModelError, match=r"Net is in training mode.*call .eval\(\)"):
        wrap(module, images(2))
    module.eval().norm.train()
    with pytest.raises(UnsupportedModelError, match="its part 'norm' is in training mode"):
        wrap(module, images(2))
    with wrap(module.eval(), images(2)) as fast:
        module.train()
        with pytest.raises(UnsupportedModelError, match="training mode"):
            fast(images(2))


def test_a_hook_that_changes_results_is_refused_since_replays_would_leave_it_out() -> None:
    module = Net().eval()
    module.head.register_forward_hook(lambda part, args, result: result + 1)
    with pytest.raises(UnsupportedModelError, match="a forward hook changes them"):
        wrap(module, images(2))


@pytest.mark.parametrize(
    ("module", "example", "why"),
    [
        (torch.relu, torch.zeros(1, 2), "takes a torch.nn.Module, got a builtin"),
        (nn.Identity().eval(), torch.zeros(0, 2), "at least one row"),
        (nn.Identity().eval(), torch.zeros(2), "at least one row"),
        (nn.Identity().eval(), [1], "got a list"),
    ],
)
def test_what_is_no_module_or_no_batch_is_refused(module: Any, example: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        wrap(module, example)


def test_options_of_encoders_that_a_module_lacks_are_refused() -> None:
    for options in ({"features": "embedding"}, {"tile_size": 32}, {"backend": "cuda"}):
        with pytest.raises(ConfigError):
            wrapped(Net(), **options)


# ------------------------------------------------------------------ life


def test_close_gives_back_and_the_module_stays_as_it_was() -> None:
    module = Net().eval()
    before = copy.deepcopy(module.state_dict())
    fast = wrapped(module)
    fast(images(2))
    fast.close()
    fast.close()
    with pytest.raises(ClosedError):
        fast(images(2))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_weights_changed_in_place_count_and_weights_that_move_end_it() -> None:
    module = Net().eval()
    with wrapped(module) as fast, torch.no_grad():
        fast(images(2))
        module.head.weight.mul_(2)
        assert close(fast(images(2)), module(images(2)))
        module.double()
        with pytest.raises(ClosedError, match="moved"):
            fast(images(2))
