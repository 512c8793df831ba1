"""`spread`: a pure function that gives every item to one rank, evenly."""

import hypothesis.strategies as st
from hypothesis import given

from onereplay.parallel import spread

LOADS = st.lists(st.integers(1, 20_000), max_size=60)


@given(LOADS, st.integers(1, 9))
def test_every_item_goes_to_exactly_one_rank(loads: list[int], num_ranks: int) -> None:
    shares = spread(loads, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(place for share in shares for place in share) == list(range(len(loads)))
    assert all(share == sorted(share) for share in shares)


@given(LOADS.filter(bool), st.integers(1, 9))
def test_no_share_exceeds_the_mean_by_more_than_the_heaviest_item(loads: list[int], num_ranks: int) -> None:
    """Whoever gets an item had the least load, which is at most the mean: so no share exceeds mean + item."""
    shares = spread(loads, num_ranks)
    assert max(sum(loads[place] for place in share) for share in shares) <= sum(loads) / num_ranks + max(loads)


def test_equal_items_are_dealt_out_evenly() -> None:
    assert spread([7] * 10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]


def test_the_heaviest_goes_first_and_alone() -> None:
    assert spread([1, 100, 1, 1], 2) == [[1], [0, 2, 3]]


def test_ranks_without_items_have_an_empty_share() -> None:
    assert spread([5], 3) == [[0], [], []]
    assert spread([], 2) == [[], []]
