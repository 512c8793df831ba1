"""The rule, as a property of integers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onereplay.core.items import Item, Modality, PathSize
from onereplay.core.plan import Capacity, Eager, Reason, Replay, batches, plan

sizes = st.builds(
    PathSize,
    tokens=st.integers(1, 300),
    patches=st.integers(1, 1200),
    sequences=st.integers(1, 5),
    windows=st.integers(0, 5),
    longest=st.integers(1, 400),
)
items_strategy = st.lists(
    st.builds(
        Item, modality=st.sampled_from(Modality), sizes=st.dictionaries(st.sampled_from(["global", "local"]), sizes)
    ),
    max_size=12,
)
ladders = st.lists(
    st.builds(
        Capacity,
        tokens=st.integers(1, 900),
        patches=st.integers(1, 3600),
        sequences=st.integers(1, 20),
        items=st.integers(1, 12),
        windows=st.integers(0, 30),
        longest=st.integers(1, 400),
    ),
    max_size=6,
    unique_by=lambda capacity: capacity.tokens,
)
capacities_strategy = st.fixed_dictionaries({"global": ladders, "local": ladders})


def fits(items: list[Item], path: str, capacity: Capacity) -> bool:
    """The rule written a second time, dimension by dimension."""
    used = [item.sizes[path] for item in items if path in item.sizes]
    return (
        sum(size.tokens for size in used) <= capacity.tokens
        and sum(size.patches for size in used) <= capacity.patches
        and sum(size.sequences for size in used) <= capacity.sequences
        and sum(size.windows for size in used) <= capacity.windows
        and max((size.longest for size in used), default=0) <= capacity.longest
        and len(used) <= capacity.items
    )


@given(items_strategy, capacities_strategy)
def test_every_used_path_gets_one_step_the_smallest_that_fits_or_eager(
    items: list[Item], capacities: dict[str, list[Capacity]]
) -> None:
    steps = plan(items, capacities).steps
    assert set(steps) == {path for item in items for path in item.sizes}
    for path, step in steps.items():
        fitting = [capacity for capacity in capacities[path] if fits(items, path, capacity)]
        if isinstance(step, Replay):
            assert step.capacity in fitting
            assert step.capacity.tokens == min(capacity.tokens for capacity in fitting)
        else:
            assert not fitting


@given(items_strategy, capacities_strategy, st.randoms(use_true_random=False))
def test_any_order_of_the_same_items_gives_the_same_plan(
    items: list[Item], capacities: dict[str, list[Capacity]], shuffler: random.Random
) -> None:
    shuffled = list(items)
    shuffler.shuffle(shuffled)
    assert plan(shuffled, capacities) == plan(items, capacities)


@given(items_strategy, capacities_strategy)
def test_every_item_is_counted_once_in_the_demand(items: list[Item], capacities: dict[str, list[Capacity]]) -> None:
    demands = plan(items, capacities).demands
    for path, demand in demands.items():
        used = [item.sizes[path] for item in items if path in item.sizes]
        assert (demand.items, demand.tokens) == (len(used), sum(size.tokens for size in used))


def image(tokens: int, *, longest: int | None = None, sequences: int = 1) -> Item:
    size = PathSize(tokens, tokens * 4, sequences, longest=longest or tokens * 4)
    return Item(Modality.IMAGE, {"vision": size})


def capacity(tokens: int, **other: int) -> Capacity:
    fields = {"sequences": 64, "items": 64, "longest": tokens * 4, **other}
    return Capacity(tokens=tokens, patches=tokens * 4, **fields)


LADDER = [capacity(64), capacity(1024), capacity(1152)]


def test_64_and_1024_tokens_are_one_replay_of_1152_not_two() -> None:
    assert plan([image(64), image(1024)], {"vision": LADDER}).steps == {"vision": Replay(LADDER[2])}


def test_nine_items_with_a_bound_of_eight_are_one_eager_forward_of_nine() -> None:
    found = plan([image(64)] * 9, {"vision": [capacity(1024, items=8)]})
    assert found.steps == {"vision": Eager(Reason.TOO_MANY_ITEMS, "9 items > 8")}
    assert found.demands["vision"].items == 9


@pytest.mark.parametrize(
    ("items", "reason", "detail"),
    [
        ([image(1153)], Reason.OVER_LARGEST_BUDGET, "1,153 tokens > 1,152"),
        ([image(65, sequences=65)], Reason.TOO_MANY_SEQUENCES, "65 sequences > 64"),
        ([image(64, longest=4609)], Reason.SEQUENCE_TOO_LONG, "4,609 longest > 4,608"),
    ],
)
def test_the_reason_names_the_dimension_and_both_numbers(items: list[Item], reason: Reason, detail: str) -> None:
    step = plan(items, {"vision": LADDER}).steps["vision"]
    assert isinstance(step, Eager)
    assert step.reason is reason
    assert detail in step.detail


def test_an_unsupported_item_makes_its_whole_path_eager_and_says_why() -> None:
    odd = Item(Modality.IMAGE, image(64).sizes, unsupported="tiles of 224x224")
    step = plan([image(64), odd], {"vision": LADDER}).steps["vision"]
    assert step == Eager(Reason.UNSUPPORTED_INPUT, "tiles of 224x224")


def test_without_captured_graphs_everything_is_eager_with_that_reason() -> None:
    assert plan([image(64)], {"vision": []}).steps == {"vision": Eager(Reason.NOT_CAPTURED)}


def test_a_path_that_no_item_uses_has_no_step() -> None:
    assert plan([image(64)], {"vision": LADDER, "local": LADDER}).steps.keys() == {"vision"}
    assert plan([], {"vision": LADDER}).steps == {}


def test_more_sequences_than_a_small_budget_holds_go_to_a_larger_one() -> None:
    """Failure 1: grid (9,4,4), 36 tokens in nine sequences, where the small graph holds two."""
    ladder = [capacity(64, sequences=2), capacity(96, sequences=64)]
    assert plan([image(36, sequences=9)], {"vision": ladder}).steps == {"vision": Replay(ladder[1])}


def test_a_plan_prints_budget_tokens_padding_or_reason() -> None:
    assert str(plan([image(1100)], {"vision": LADDER})) == "vision: replay 1152 (1100 tokens, 52 padding)"
    assert "vision: eager, over the largest budget (2,000 tokens > 1,152" in str(
        plan([image(2000)], {"vision": LADDER})
    )
    assert str(plan([], {"vision": LADDER})) == "nothing to run"


def test_batches_are_full_in_order_and_never_hold_what_no_capacity_does() -> None:
    capacities = {"vision": [Capacity(tokens=8, patches=32, sequences=8, items=8, longest=32)]}
    entries = [4, 4, 1, 9, 3, 0, 5, 9, 9]  # 0 stands for a source that cannot be read: it rides along
    found = list(batches(entries, lambda tokens: image(tokens) if tokens else None, lambda: capacities))
    assert found == [[4, 4], [1], [9], [3, 0, 5], [9], [9]]


def test_batches_read_no_further_than_they_must() -> None:
    capacities = {"vision": [Capacity(tokens=8, patches=32, sequences=8, items=8, longest=32)]}
    endless = iter(lambda: 5, 0)
    assert next(batches(endless, image, lambda: capacities)) == [5]
