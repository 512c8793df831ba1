"""Grids of token budgets that `onereplay simulate` compares and `onereplay bench --profile` measures.

Each is a function of the cap and of the tokens of a tile (1 for a packed path), and is named by its levels at a cap of
5,120 tokens.
"""

from collections.abc import Callable, Mapping, Sequence

from onereplay.bench.dispatch import half_octave_budgets
from onereplay.core.budgets import DEFAULT_MAX_TOKEN_BUDGET, normalize_budgets, round_up, token_budgets

BudgetGrid = Callable[[int, int], tuple[int, ...]]
"""`grid(cap, tokens of a tile)`: the budgets, ascending."""

_STEPS_FROM, _STEP = 1024, 128


def default_grid(cap: int, unit: int = 1) -> tuple[int, ...]:
    """The library's own grid."""
    return token_budgets(None, cap, item_tokens=unit)


def steps_grid(cap: int, unit: int = 1) -> tuple[int, ...]:
    """The library's grid with steps of 128 from 1,024 all the way to the cap."""
    found = default_grid(cap, unit)
    steps = (round_up(step, unit) for step in range(_STEPS_FROM, found[-1], _STEP))
    return tuple(sorted({*found, *(step for step in steps if found[0] <= step < found[-1])}))


GRIDS: Mapping[str, BudgetGrid] = {"36": default_grid, "49": steps_grid}


def studied_levels(units: Sequence[int], largest: int) -> tuple[int, ...]:
    """Every level of the grids at the default cap and of the earlier 25-level grid, up to what a model takes.

    Args:
        units: tokens of a tile of each path.
        largest: the most tokens of one batch.
    """
    cap = min(DEFAULT_MAX_TOKEN_BUDGET, largest)
    ours = {level for grid in GRIDS.values() for unit in (1, *units) if unit <= cap for level in grid(cap, unit)}
    earlier = {level for level in half_octave_budgets() if level <= largest}
    return normalize_budgets(ours | earlier)
