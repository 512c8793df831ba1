"""`onereplay budgets`: the grid of token budgets, which is the same on every machine."""

from typing import Annotated

import typer

from onereplay.cli.options import JsonFlag
from onereplay.cli.printing import print_json, print_line
from onereplay.config import load_config
from onereplay.core.budgets import token_budgets


def budgets(
    minimum: Annotated[
        int | None, typer.Option("--min", metavar="N", help="The smallest budget; 64, or one item of --item-tokens.")
    ] = None,
    maximum: Annotated[
        str | None, typer.Option("--max", metavar="N|none", help="The largest; 5120 by default, none is 16384.")
    ] = None,
    item_tokens: Annotated[
        int, typer.Option("--item-tokens", metavar="N", help="Tokens of a tile, for models of fixed tiles.")
    ] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Print the grid of token budgets."""
    grid = token_budgets(minimum, _maximum(maximum), item_tokens=item_tokens)
    if as_json:
        print_json({"budgets": grid, "count": len(grid)})
        return
    print_line(" ".join(map(str, grid)))
    tiles = f", {grid[0] // item_tokens:,} to {grid[-1] // item_tokens:,} tiles" if item_tokens > 1 else ""
    print_line(f"{len(grid)} budgets, {grid[0]:,} to {grid[-1]:,} tokens{tiles}")


def _maximum(text: str | None) -> int:
    """The cap as the config reads it; `none` is the most that any model puts into a batch."""
    cap = load_config(environment={}, flags={"max_token_budget": text}).max_token_budget
    if cap is not None:
        return cap
    from onereplay.core.budgets import MAX_BATCH_TOKENS

    return MAX_BATCH_TOKENS
