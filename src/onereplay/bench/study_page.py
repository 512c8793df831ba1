"""A simulation as a page of Markdown and as a plot."""

from collections.abc import Sequence
from pathlib import Path

from onereplay.bench.analytic import Compared
from onereplay.bench.report import number, percent, table
from onereplay.bench.run import LARGE_BATCH
from onereplay.bench.simulate import AGAINST, Outcome, Study
from onereplay.core.budgets import DEFAULT_MAX_TOKEN_BUDGET
from onereplay.errors import MissingDependencyError

HEADER = (
    "grid",
    "cap",
    "levels",
    "geomean",
    f"over {LARGE_BATCH:,}",
    "worst",
    "its tokens",
    "slower by 2 %",
    "eager",
    "padding",
    "graph MiB",
    "power-of-two",
    "worst of it",
)
COMPARED = ("path", "tokens", "replay", "predicted", "ratio", "eager", "predicted", "ratio")


def cells(outcome: Outcome) -> list[str]:
    """One row under `HEADER`."""
    versus, other = outcome.against(AGAINST), outcome.against("power-of-two")
    return [
        *(outcome.grid, f"{outcome.cap:,}", f"{outcome.levels:,}", f"{versus.geomean:.3f}"),
        *("-" if versus.geomean_large is None else f"{versus.geomean_large:.3f}", f"{versus.worst:.3f}"),
        *(f"{outcome.worst_tokens:,}", f"{versus.slower_share:.2%}", percent(outcome.eager_share)),
        *(percent(outcome.padding_fraction), f"{outcome.graph_mib:,.0f}"),
        *(f"{other.geomean:.3f}", f"{other.worst:.3f}"),
    ]


def compared_cells(one: Compared) -> list[str]:
    """One row under `COMPARED`."""
    return [
        *(one.path, f"{one.tokens:,}"),
        *(number(one.replay_ms), number(one.predicted_replay_ms), number(one.replay_ratio)),
        *(number(one.eager_ms), number(one.predicted_eager_ms), number(one.eager_ratio)),
    ]


def recommendations(study: Study) -> list[str]:
    """A sentence a grid."""
    return [_recommendation(study, grid, cap) for grid, cap in study.recommended.items()]


def _recommendation(study: Study, grid: str, cap: int | None) -> str:
    if cap is not None:
        return f"grid {grid}: the smallest cap with no batch over 2 % slower than by the {AGAINST} rule is {cap:,}"
    shares = {o.cap: o.against().slower_share for o in study.overall if o.grid == grid}
    fewest = min(shares, key=lambda one: (shares[one], one))
    return (
        f"grid {grid}: at every cap some batch is over 2 % slower than by the {AGAINST} rule; the fewest are "
        f"{shares[fewest]:.2%}, at {fewest:,}"
    )


def study_page(study: Study) -> str:
    """The simulation as Markdown."""
    lines = [
        "# Caps and grids of budgets, simulated",
        "",
        *(f"- {model}" for model in study.models),
        f"- {study.workload}, {study.batches:,} batches over all models; `{study.command}`",
        "",
        f"Ratios are the time of the {AGAINST} rule (25 budgets to 16,384, greedy packing, several replays) over one",
        f"replay or one eager forward: over {LARGE_BATCH:,} tokens, of the worst batch, and the share of batches that",
        "are slower by more than 2 %. The last two columns are against the power-of-two rule. What is computed, and",
        "what is left out: `onereplay.bench.simulate`, `onereplay.bench.analytic`.",
        "",
        *(f"- {sentence}" for sentence in recommendations(study)),
        *(f"- {note}" for note in study.notes),
    ]
    if len(study.models) > 1:
        lines += ["", "## All models, each counting alike", "", *table(HEADER, [cells(one) for one in study.overall])]
    for model in dict.fromkeys(outcome.model for outcome in study.outcomes):
        rows = [cells(outcome) for outcome in study.outcomes if outcome.model == model]
        lines += ["", f"## {model}", "", *table(HEADER, rows)]
    for model, rows_compared in study.compared:
        lines += ["", f"## {model}: milliseconds predicted and measured", ""]
        lines += table(COMPARED, [compared_cells(one) for one in rows_compared])
        lines += ["", f"{in_short(rows_compared)}."]
    return "\n".join(lines) + "\n"


def in_short(rows: Sequence[Compared]) -> str:
    """Between which ratios the predictions lie."""
    found = []
    for what, ratios in (
        ("replays", [one.replay_ratio for one in rows if one.replay_ratio]),
        ("eager forwards", [one.eager_ratio for one in rows if one.eager_ratio]),
    ):
        if ratios:
            found.append(f"{what} {min(ratios):.2f} to {max(ratios):.2f}")
    return f"Predicted over measured: {', '.join(found)}"


def study_plot(study: Study, directory: Path, stem: str) -> Path:
    """A PNG file: speed-up, share of slower batches, and memory over the cap, a line a grid.

    Raises:
        MissingDependencyError: matplotlib is absent.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as err:
        raise MissingDependencyError('plots need matplotlib: pip install "onereplay[bench]"') from err
    figure, (speed, slower, memory) = pyplot.subplots(1, 3, figsize=(16, 5))
    for grid in study.recommended:
        row = [outcome for outcome in study.overall if outcome.grid == grid]
        caps = [outcome.cap for outcome in row]
        versus = [outcome.against(AGAINST) for outcome in row]
        speed.plot(caps, [one.geomean for one in versus], marker="o", label=f"grid {grid}")
        large = [(cap, one.geomean_large) for cap, one in zip(caps, versus, strict=True) if one.geomean_large]
        if large:
            speed.plot(*zip(*large, strict=True), marker="o", linestyle=":", label=f"{grid}, over {LARGE_BATCH:,}")
        slower.plot(caps, [100 * one.slower_share for one in versus], marker="o", label=f"grid {grid}")
        memory.plot(caps, [outcome.graph_mib / len(study.models) for outcome in row], marker="o", label=f"grid {grid}")
    speed.set(ylabel=f"{AGAINST} rule over ours, geomean")
    slower.set(ylabel="batches over 2 % slower, %")
    memory.set(ylabel="graph memory, MiB a model")
    for axes in (speed, slower, memory):
        axes.set(xscale="log", xlabel="cap, tokens")
        axes.axvline(DEFAULT_MAX_TOKEN_BUDGET, color="k", linewidth=0.5)
        axes.legend()
    figure.suptitle(f"{study.workload}, {len(study.models)} models")
    path = directory / f"{stem}.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return path
