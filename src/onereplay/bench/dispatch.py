"""Rules that turn a batch into replays, as pure functions of integers: two earlier ones and this project's.

The earlier rules are baselines to measure against, not options of the library. Both sort the items by size, ascending
(equal sizes keep the caller's order), and pack them greedily: a sub-batch takes the next item while its tokens still
fit the largest budget and its items stay within the bound. Each sub-batch is one replay of the smallest budget that
holds it. Ascending is what the public implementation of these rules did: small items share a sub-batch, and a large one
does not drag small ones into a larger budget. An item over the largest budget is an eager forward by itself.

Here an item is its number of tokens and nothing else: sequences and windows bind no batch of ordinary pictures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from onereplay.config import DEFAULT_MAX_ITEMS
from onereplay.core.budgets import token_budgets
from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.plan import Capacity, Replay, plan

EARLIER_MIN_BUDGET = 64
EARLIER_MAX_BUDGET = 16_384
_QUARTERS_END = 1024
_PATH = "vision"


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Items that run together: one replay, or one eager forward."""

    items: tuple[int, ...]
    """Indices into the caller's batch."""
    tokens: int
    budget: int | None
    """The budget that is replayed; `None` is an eager forward."""

    @property
    def padding(self) -> int:
        """Rows of the replay that hold no token; an eager forward has none."""
        return 0 if self.budget is None else self.budget - self.tokens


Rule = Callable[[Sequence[int], int], list[SubBatch]]
"""`rule(tokens of each item, max_items)`: the sub-batches, in the order in which they run."""


def power_of_two_budgets() -> tuple[int, ...]:
    """64, 128, 256, ... 16,384: nine levels."""
    return tuple(takewhile(lambda level: level <= EARLIER_MAX_BUDGET, (EARLIER_MIN_BUDGET << n for n in range(64))))


def half_octave_budgets() -> tuple[int, ...]:
    """64 to 16,384 in 25 levels: quarter-octave steps to 1,024 (17 levels), then half-octave steps (8 more).

    Steps are linear inside an octave, as in the project's grid: 4, 5, 6, 7 quarters of a power of two, then 2 and 3
    halves of one.
    """
    levels = []
    for octave in power_of_two_budgets()[:-1]:
        quarters = (4, 5, 6, 7) if octave < _QUARTERS_END else (4, 6)
        levels += [octave * quarter // 4 for quarter in quarters]
    return (*levels, EARLIER_MAX_BUDGET)


def smallest_budget(tokens: int, budgets: Sequence[int]) -> int | None:
    """The smallest budget that holds `tokens`; `None` if none does."""
    return min((budget for budget in budgets if budget >= tokens), default=None)


def power_of_two_rule(
    sizes: Sequence[int], max_items: int = DEFAULT_MAX_ITEMS, budgets: Sequence[int] | None = None
) -> list[SubBatch]:
    """Rule of the power-of-two budgets: greedy packing, as the module says."""
    return _packed(sizes, max_items, budgets or power_of_two_budgets(), _never)


def half_octave_rule(
    sizes: Sequence[int], max_items: int = DEFAULT_MAX_ITEMS, budgets: Sequence[int] | None = None
) -> list[SubBatch]:
    """Rule of the 25-level grid: greedy packing that stops where two replays are smaller than one.

    A new sub-batch starts where `budget(current) + budget(item) < budget(current and item)` and
    `budget(item) >= budget(current)`.
    """
    return _packed(sizes, max_items, budgets or half_octave_budgets(), _split_is_smaller)


def one_replay_rule(
    sizes: Sequence[int], max_items: int = DEFAULT_MAX_ITEMS, budgets: Sequence[int] | None = None
) -> list[SubBatch]:
    """This project's rule, by the library's own `plan`: the whole batch is one replay or one eager forward."""
    _check(sizes)
    if not sizes:
        return []
    items = [Item(Modality.IMAGE, {_PATH: PathSize(size, size, 1)}) for size in sizes]
    ladder = [Capacity(budget, budget, max_items, min(budget, max_items)) for budget in budgets or token_budgets()]
    step = plan(items, {_PATH: ladder}).steps[_PATH]
    budget = step.capacity.tokens if isinstance(step, Replay) else None
    return [SubBatch(tuple(range(len(sizes))), sum(sizes), budget)]


RULES: Mapping[str, Rule] = {
    "power of two": power_of_two_rule,
    "half octave": half_octave_rule,
    "one replay": one_replay_rule,
}

_Split = Callable[[int, int, Sequence[int]], bool]
"""`split(tokens of the current sub-batch, tokens of the next item, budgets)`: whether to start a new one though both
fit together."""


def _never(current: int, item: int, budgets: Sequence[int]) -> bool:
    return False


def _split_is_smaller(current: int, item: int, budgets: Sequence[int]) -> bool:
    before, alone, together = (
        min(budget for budget in budgets if budget >= tokens) for tokens in (current, item, current + item)
    )
    return before + alone < together and alone >= before


def _packed(sizes: Sequence[int], max_items: int, budgets: Sequence[int], split: _Split) -> list[SubBatch]:
    _check(sizes)
    groups: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index]):
        fits = groups and len(groups[-1]) < max_items and tokens + sizes[index] <= max(budgets)
        if fits and not split(tokens, sizes[index], budgets):
            groups[-1].append(index)
            tokens += sizes[index]
        else:
            groups.append([index])
            tokens = sizes[index]
    return [_sub_batch(group, sizes, budgets) for group in groups]


def _sub_batch(group: Sequence[int], sizes: Sequence[int], budgets: Sequence[int]) -> SubBatch:
    tokens = sum(sizes[index] for index in group)
    return SubBatch(tuple(group), tokens, smallest_budget(tokens, budgets))


def _check(sizes: Sequence[int]) -> None:
    if any(size < 1 for size in sizes):
        raise ValueError(f"an item needs at least one token, got {list(sizes)}")
