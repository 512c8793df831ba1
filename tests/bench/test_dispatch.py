"""The dispatch rules: every item once, nothing over capacity, padding accounted, and examples worked by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onereplay.bench.dispatch import (
    RULES,
    Rule,
    SubBatch,
    half_octave_budgets,
    half_octave_rule,
    one_replay_rule,
    power_of_two_budgets,
    power_of_two_rule,
    smallest_budget,
)
from onereplay.core.budgets import token_budgets

BUDGETS = {
    "power of two": power_of_two_budgets(),
    "half octave": half_octave_budgets(),
    "one replay": token_budgets(),
}
batches = st.lists(st.integers(1, 20_000), max_size=40)
bounds = st.integers(1, 64)
every_rule = pytest.mark.parametrize(("name", "rule"), RULES.items(), ids=list(RULES))


def test_there_are_9_powers_of_two_to_16384() -> None:
    assert power_of_two_budgets() == (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


def test_the_half_octave_grid_has_25_levels() -> None:
    assert half_octave_budgets() == (
        *(64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
        *(1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384),
    )
    assert len(half_octave_budgets()) == 25


@every_rule
@given(sizes=batches, max_items=bounds)
def test_every_item_runs_exactly_once(name: str, rule: Rule, sizes: list[int], max_items: int) -> None:
    assert sorted(index for part in rule(sizes, max_items) for index in part.items) == list(range(len(sizes)))


@every_rule
@given(sizes=batches, max_items=bounds)
def test_a_replay_holds_its_items_in_the_smallest_budget(
    name: str, rule: Rule, sizes: list[int], max_items: int
) -> None:
    for part in rule(sizes, max_items):
        assert part.tokens == sum(sizes[index] for index in part.items)
        if part.budget is not None:
            assert len(part.items) <= max_items
            assert part.budget == smallest_budget(part.tokens, BUDGETS[name])


@every_rule
@given(sizes=batches, max_items=bounds)
def test_replayed_rows_are_tokens_and_padding(name: str, rule: Rule, sizes: list[int], max_items: int) -> None:
    parts = rule(sizes, max_items)
    rows = sum(part.tokens if part.budget is None else part.budget for part in parts)
    assert rows == sum(sizes) + sum(part.padding for part in parts)
    assert all(part.padding >= 0 for part in parts)


@pytest.mark.parametrize("rule", [power_of_two_rule, half_octave_rule])
@given(sizes=batches, max_items=bounds)
def test_earlier_rules_run_eagerly_only_single_items_over_the_largest_budget(
    rule: Rule, sizes: list[int], max_items: int
) -> None:
    eager = [part for part in rule(sizes, max_items) if part.budget is None]
    assert sorted(part.items[0] for part in eager) == [index for index, size in enumerate(sizes) if size > 16_384]
    assert all(len(part.items) == 1 for part in eager)


@given(sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=40), max_items=bounds)
def test_one_replay_never_splits_and_is_eager_only_over_a_bound(sizes: list[int], max_items: int) -> None:
    (part,) = one_replay_rule(sizes, max_items)
    assert part.items == tuple(range(len(sizes)))
    assert (part.budget is None) == (sum(sizes) > 5120 or len(sizes) > max_items)


@given(sizes=batches, max_items=bounds)
def test_power_of_two_packing_is_greedy(sizes: list[int], max_items: int) -> None:
    parts = power_of_two_rule(sizes, max_items)
    for part, following in pairwise(parts):
        full = len(part.items) == max_items
        assert full or part.tokens + sizes[following.items[0]] > 16_384


def test_power_of_two_by_hand() -> None:
    # Ascending: 64 + 300 + 1,000 + 9,000 = 10,364 fit 16,384; 9,001 more do not; 20,000 fit no budget.
    assert power_of_two_rule([20_000, 9000, 64, 9001, 1000, 300]) == [
        SubBatch((2, 5, 4, 1), 10_364, 16_384),
        SubBatch((3,), 9001, 16_384),
        SubBatch((0,), 20_000, None),
    ]


def test_power_of_two_respects_the_items_bound() -> None:
    assert power_of_two_rule([64] * 5, max_items=2) == [
        SubBatch((0, 1), 128, 128),
        SubBatch((2, 3), 128, 128),
        SubBatch((4,), 64, 64),
    ]


def test_half_octave_splits_where_two_replays_are_smaller() -> None:
    # 64 + 64: 64 + 64 < 128 is false, together. Then 128 + 1,024 < budget(1,128) = 1,536 and 1,024 >= 128: apart.
    assert half_octave_rule([1000, 64, 64]) == [SubBatch((1, 2), 128, 128), SubBatch((0,), 1000, 1024)]


def test_half_octave_keeps_together_what_two_replays_would_not_shrink() -> None:
    # 512 + 640 < budget(1,100) = 1,536: apart.
    assert half_octave_rule([500, 600]) == [SubBatch((0,), 500, 512), SubBatch((1,), 600, 640)]
    # 640 + 640 < budget(1,200) = 1,536: apart. 768 + 768 < 1,536 is false: together.
    assert half_octave_rule([600, 600]) == [SubBatch((0,), 600, 640), SubBatch((1,), 600, 640)]
    assert half_octave_rule([760, 760]) == [SubBatch((0, 1), 1520, 1536)]


def test_half_octave_does_not_split_off_an_item_smaller_than_what_came_before() -> None:
    # The third item: 896 + 640 < budget(1,480) = 1,536 is false, together. The fourth, 600, has budget 640, and
    # 1,536 + 640 < budget(2,080) = 3,072, but 640 < 1,536: together.
    assert half_octave_rule([290, 590, 600, 600]) == [SubBatch((0, 1, 2, 3), 2080, 3072)]


def test_one_replay_by_hand() -> None:
    # mix8 of Qwen2.5-VL: 2,611 tokens, budget 2,816. Over the cap, and over the items bound: one eager forward.
    mix = [64, 64, 256, 256, 256, 391, 300, 1024]
    assert one_replay_rule(mix) == [SubBatch(tuple(range(8)), 2611, 2816)]
    assert one_replay_rule(mix)[0].padding == 205
    assert one_replay_rule([1024] * 8) == [SubBatch(tuple(range(8)), 8192, None)]
    assert one_replay_rule([64] * 9, max_items=8) == [SubBatch(tuple(range(9)), 576, None)]
    assert one_replay_rule([]) == []


def test_rules_take_other_budgets() -> None:
    assert half_octave_rule([256] * 3, budgets=[256, 512, 768]) == [SubBatch((0, 1, 2), 768, 768)]
    assert one_replay_rule([256] * 3, budgets=[512]) == [SubBatch((0, 1, 2), 768, None)]


@every_rule
def test_an_item_without_tokens_is_refused(name: str, rule: Rule) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        rule([64, 0], 64)
