"""The token-budget grid: which sizes are captured. Integers only, the same on every rank and every start.

The grid is one infinite ladder of levels, and every grid is a stretch of it:

* up to 1,024: quarter-octave steps (4, 5, 6, 7 eighths of a power of two: 64, 80, 96, 112, 128, 160, ...);
* from 1,024 to 2,560: steps of 128;
* above 2,560: the previous level times 2^(1/8), rounded up to a multiple of 128.

Padding is therefore below 25 % up to 1,024 tokens and below about 12.5 % above. Moving the minimum or the cap never
moves another level.
"""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from math import isqrt

from onereplay.errors import ConfigError

DEFAULT_MIN_TOKEN_BUDGET = 64
DEFAULT_MAX_TOKEN_BUDGET = 5120
MAX_BATCH_TOKENS = 16_384
"""What `max_token_budget=None` means: the most tokens of one image in the published processors, and the largest budget
of earlier encoder-graph designs."""
EXACT_TILES = 16
"""A path of fixed-size items has every count up to this one as a level of its own."""

_QUARTERS_END = 1024
_STEPS_END = 2560
_STEP = 128


def levels() -> Iterator[int]:
    """The infinite ladder, ascending from 1. Integer arithmetic only: no rounding depends on a platform."""
    yield from (1, 2, 3)
    octave = 4
    while octave < _QUARTERS_END:
        yield from (octave * quarter // 4 for quarter in (4, 5, 6, 7))
        octave *= 2
    yield from range(_QUARTERS_END, _STEPS_END, _STEP)
    level = _STEPS_END
    while True:
        yield level
        level = _eighth_octave_above(level)


def _eighth_octave_above(level: int) -> int:
    """The smallest multiple of 128 that is at least `level * 2**(1/8)`, by an exact integer root."""
    power = 2 * level**8
    root = isqrt(isqrt(isqrt(power)))
    return round_up(root + (root**8 < power), _STEP)


def token_budgets(
    minimum: int | None = None, maximum: int = DEFAULT_MAX_TOKEN_BUDGET, *, item_tokens: int = 1
) -> tuple[int, ...]:
    """The grid from `minimum` to `maximum` tokens, both included, ascending and without repeats.

    Args:
        minimum: the smallest budget, in tokens. `None` is 64 for a packed path and one tile for a path of tiles.
        maximum: the largest budget, in tokens. It is always a level, also where the ladder has none.
        item_tokens: tokens of one fixed-size item (a tile). Above 1, every level is a multiple of it: 1 to 16 items
            exactly, then the ladder rounded up to multiples, and `maximum` rounded down to one, so that the cap holds.

    Raises:
        ConfigError: a bound is not a positive integer, the minimum exceeds the maximum, or no item fits the maximum.
    """
    item_tokens = positive("item_tokens", item_tokens)
    if minimum is None:
        minimum = min(maximum, DEFAULT_MIN_TOKEN_BUDGET) if item_tokens == 1 else item_tokens
    minimum = positive("min_token_budget", minimum)
    maximum = positive("max_token_budget", maximum)
    if item_tokens > 1:
        return _tile_budgets(minimum, maximum, item_tokens)
    if minimum > maximum:
        raise ConfigError(
            f"max_token_budget={maximum} is below the smallest budget {minimum}; raise it to at least {minimum}"
        )
    inside = [level for level in takewhile(lambda level: level < maximum, levels()) if level > minimum]
    return tuple(sorted({minimum, *inside, maximum}))


def _tile_budgets(minimum: int, maximum: int, item_tokens: int) -> tuple[int, ...]:
    largest = maximum // item_tokens * item_tokens
    if largest == 0:
        raise ConfigError(
            f"max_token_budget={maximum} holds no tile of {item_tokens} tokens; raise it to at least {item_tokens}"
        )
    exact = [tiles * item_tokens for tiles in range(1, EXACT_TILES + 1)]
    above = (round_up(level, item_tokens) for level in takewhile(lambda level: level < largest, levels()))
    grid = {level for level in (*exact, *above, largest) if minimum <= level <= largest}
    return tuple(sorted(level for level in grid if level in exact or level > exact[-1]))


def normalize_budgets(budgets: object, *, item_tokens: int = 1) -> tuple[int, ...]:
    """A user's own list, sorted, without repeats, each rounded up to a multiple of `item_tokens`.

    Raises:
        ConfigError: the list is empty, or an entry is not a positive integer (bool is refused).
    """
    if isinstance(budgets, str) or not isinstance(budgets, Iterable):
        raise ConfigError(f"token_budgets={budgets!r} is not a list of integers; give one such as [64, 256, 1024]")
    listed = [positive("token_budgets", budget) for budget in budgets]
    if not listed:
        raise ConfigError("token_budgets=[] captures nothing; give at least one budget, or leave it out for the grid")
    return tuple(sorted({round_up(budget, item_tokens) for budget in listed}))


def positive(name: str, value: object) -> int:
    """`value` as a positive int.

    Raises:
        ConfigError: `value` is a bool, not an integer, zero or negative; names the option, the value and the rule.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise ConfigError(f"{name}={value!r} is not an integer; give a positive integer")
    integer: int = value.__index__()  # type: ignore[attr-defined]
    if integer <= 0:
        raise ConfigError(f"{name}={integer} is not positive; give a positive integer")
    return integer


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
