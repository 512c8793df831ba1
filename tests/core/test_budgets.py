"""The grid: levels, bounds, tiles, refusals."""

from fractions import Fraction
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onereplay.core.budgets import levels, normalize_budgets, token_budgets
from onereplay.errors import ConfigError

DEFAULT_GRID = (
    *(64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
    *range(1152, 2561, 128),
    *(2816, 3072, 3456, 3840, 4224, 4608, 5120),
)


def test_the_default_grid_is_the_36_levels_of_the_design() -> None:
    assert token_budgets() == DEFAULT_GRID
    assert len(DEFAULT_GRID) == 36


@given(st.integers(1, 4000), st.integers(1, 40_000))
def test_any_bounds_are_included_and_move_no_other_level(minimum: int, span: int) -> None:
    maximum = minimum + span
    grid = token_budgets(minimum, maximum)
    ladder = [level for level in islice(levels(), 300) if minimum < level < maximum]
    assert list(grid) == sorted({minimum, *ladder, maximum})


def test_levels_above_2560_are_the_smallest_multiple_of_128_past_an_eighth_of_an_octave() -> None:
    high = [level for level in islice(levels(), 120) if level >= 2560]
    for lower, upper in pairwise(high):
        assert upper % 128 == 0
        assert Fraction(upper, lower) ** 8 >= 2 > Fraction(upper - 128, lower) ** 8


def test_padding_stays_below_a_quarter_between_any_two_levels() -> None:
    for lower, upper in pairwise(token_budgets(64, 16_384)):
        assert upper <= lower * 5 / 4


@given(st.integers(2, 1100), st.integers(1, 20_000))
def test_tile_budgets_are_multiples_with_1_to_16_tiles_exact_and_never_over_the_cap(tile: int, cap: int) -> None:
    if cap < tile:
        with pytest.raises(ConfigError, match=f"holds no tile of {tile} tokens; raise it to at least {tile}"):
            token_budgets(None, cap, item_tokens=tile)
        return
    grid = token_budgets(None, cap, item_tokens=tile)
    tiles = [budget // tile for budget in grid]
    assert all(budget % tile == 0 for budget in grid)
    assert grid[-1] == cap // tile * tile
    assert tiles[:16] == list(range(1, min(16, cap // tile) + 1))
    for level in token_budgets(1, cap):
        if 16 * tile < level <= grid[-1]:
            assert any(level <= budget < level + tile for budget in grid)


def test_internvl_tiles_of_256_tokens_have_19_budgets_to_5120() -> None:
    assert [budget // 256 for budget in token_budgets(item_tokens=256)] == [*range(1, 17), 17, 18, 20]


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ([], r"token_budgets=\[\] captures nothing"),
        ([0], "token_budgets=0 is not positive"),
        ([-64], "token_budgets=-64 is not positive"),
        ([True], "token_budgets=True is not an integer"),
        ([64.0], "token_budgets=64.0 is not an integer"),
        (["64"], "token_budgets='64' is not an integer"),
        (64, "token_budgets=64 is not a list"),
        ("64,128", "token_budgets='64,128' is not a list"),
    ],
)
def test_a_bad_list_of_budgets_is_refused_with_value_and_rule(budgets: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        normalize_budgets(budgets)


def test_a_list_is_sorted_and_without_repeats() -> None:
    assert normalize_budgets([128, 64, 64]) == (64, 128)
    assert normalize_budgets([300, 256, 500], item_tokens=256) == (256, 512)


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 64), (-1, 64), (64, 0), (65, 64)])
def test_bad_bounds_are_refused(minimum: int, maximum: int) -> None:
    with pytest.raises(ConfigError):
        token_budgets(minimum, maximum)
