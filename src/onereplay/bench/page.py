"""A benchmark's result as a page of Markdown and as plots."""

from pathlib import Path

from onereplay.bench.report import card_lines, error, number, percent, spread, table
from onereplay.bench.run import LARGE_BATCH, REFERENCE_TOKENS, Result, Row, WorkloadResult
from onereplay.errors import MissingDependencyError


def page(result: Result) -> str:
    """The run as Markdown."""
    clock = "device time (between CUDA events)" if result.card.gpu else "wall time"
    weights = "random weights" if result.random_weights else "weights of the checkpoint"
    rewrites = ", ".join(result.rewrites) or "none"
    lines = [
        f"# {result.model}: the ways to encode a batch, side by side",
        "",
        *card_lines(result.card),
        f"- {result.device}, {result.dtype}, {weights}, {result.weight_mib:,.0f} MiB",
        f"- engine {result.engine}, attention {result.attention}, rewrites {rewrites}; plain attention "
        f"{result.plain_attention}",
        f"- roofline, measured in the run: {result.roofline}",
        f"- `{result.command}`",
        "",
        f"Milliseconds are median (p99) of {clock}. Ways, and what is in the clock: `onereplay.bench.ways`. Pixels",
        "lie on the device in the model's dtype before the clock starts. Step is what `replay` did: the budget, or",
        "eager with the reason. Limit is the larger of operations over the product rate and weights over the copy",
        "rate, for the real tokens. Errors are relative norms against the stock model in float32 with the same",
        f"weights, for single batches of up to {REFERENCE_TOKENS:,} tokens.",
        "",
        *_captures(result),
    ]
    for one in result.workloads:
        lines += ["", f"## {one.name}", ""]
        lines += _single(result, one) if one.name in ("single", "videos") else _mix(one)
    if result.skipped:
        lines += ["", "Not measured:", "", *(f"- {way}: {why}" for way, why in result.skipped.items())]
    return "\n".join(lines) + "\n"


def _captures(result: Result) -> list[str]:
    header = ("graphs of", "budgets", "largest", "dropped", "capture s", "MiB", "buffers", "pool")
    return table(
        header,
        [
            [
                *(way, str(cost.budgets), f"{cost.largest:,}", str(cost.dropped), f"{cost.seconds:.1f}"),
                *(f"{cost.mib:,.0f}", f"{cost.static_mib:,.0f}", f"{cost.pool_mib:,.0f}"),
            ]
            for way, cost in result.captures.items()
        ],
    )


def _single(result: Result, one: WorkloadResult) -> list[str]:
    ways = list(dict.fromkeys(way for row in one.rows for way in row.timings))
    others = [way for way in ways if way != "replay"]
    header = ["batch", "items", "tokens", "step", "padding", *ways, *(f"{way}/replay" for way in others)]
    header += ["limit", "of limit", "tokens/s", "host ms", "from host ms", "error ours", "error plain"]
    return table(header, [_cells(row, ways, others) for row in one.rows])


def _cells(row: Row, ways: list[str], others: list[str]) -> list[str]:
    ours = row.timings["replay"]
    host = ours.host_ms.median if ours.host_ms else None
    from_host = row.from_host.host_ms.median if row.from_host and row.from_host.host_ms else None
    return [
        *(row.batch, str(row.items), f"{row.tokens:,}", row.step, percent(row.padding_fraction)),
        *(spread(row.timings[way].best_ms) if way in row.timings else "-" for way in ways),
        *(number(_ratio(row, way)) for way in others),
        *(number(row.limit_ms), percent(row.limit_fraction), f"{row.tokens / ours.best_ms.median * 1e3:,.0f}"),
        *(number(host), number(from_host), error(row.error_ours), error(row.error_plain)),
    ]


def _ratio(row: Row, way: str) -> float | None:
    other, ours = row.ms(way), row.ms("replay")
    return other / ours if other and ours else None


def _mix(one: WorkloadResult) -> list[str]:
    header = ("replay against", "geomean", f"over {LARGE_BATCH:,} tokens", "worst", "slower by over 2 %")
    rows = [
        [v.way, f"{v.geomean:.3f}", number(v.geomean_large), f"{v.worst:.3f}", percent(v.slower_share)]
        for v in one.versus
    ]
    sizes = sorted(row.tokens for row in one.rows)
    eager = sum("eager" in row.step for row in one.rows)
    padded = [row.padding_fraction for row in one.rows if row.padding_fraction is not None]
    return [
        f"{len(one.rows)} batches, {sizes[0]:,} to {sizes[-1]:,} tokens, median {sizes[len(sizes) // 2]:,};",
        f"{eager} ran eagerly; padding of replays {percent(sum(padded) / len(padded) if padded else None)} on average.",
        "",
        *table(header, rows),
    ]


def plots(result: Result, directory: Path, stem: str) -> list[Path]:
    """PNG files: latency against tokens with every budget visible, and speed-up by batch size.

    Raises:
        MissingDependencyError: matplotlib is absent.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as err:
        raise MissingDependencyError('plots need matplotlib: pip install "onereplay[bench]"') from err
    written = []
    for one in result.workloads:
        figure, axes = pyplot.subplots(figsize=(9, 5.5))
        if one.name in ("single", "videos"):
            for way in dict.fromkeys(way for row in one.rows for way in row.timings):
                points = sorted((row.tokens, row.ms(way)) for row in one.rows if row.ms(way))
                axes.plot(*zip(*points, strict=True), marker="o", label=way)
            axes.plot(*zip(*sorted((row.tokens, row.limit_ms) for row in one.rows), strict=True), "k:", label="limit")
            axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds")
        else:
            for way in (v.way for v in one.versus):
                points = sorted((row.items, _ratio(row, way)) for row in one.rows if _ratio(row, way))
                axes.plot(*zip(*points, strict=True), ".", label=f"{way} / replay")
            axes.axhline(1, color="k", linewidth=0.5)
            axes.set(xscale="log", xlabel="items in the batch", ylabel="times faster")
        axes.set_title(f"{result.model}, {one.name}, {result.card.gpu or 'CPU'}")
        axes.legend()
        path = directory / f"{stem}_{one.name}.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)
    return written
