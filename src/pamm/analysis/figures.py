"""Figures of ``pamm analyze``: the paper's appendix on compression, on a model of your own."""

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from pamm.analysis.fidelity import Projection
from pamm.analysis.plots import COLOURS, new_figure, plain_numbers
from pamm.report import format_ratio

Rows = Sequence[dict[str, Any]]

_POINTS = 6000  # drawn of a cloud
_CLUSTERS = 7  # with a colour of their own


def pca(projection: Projection, title: str) -> Figure:
    """X and A~ in the plane of X's first two components; the largest clusters have colours."""
    figure, panels = new_figure(11, 5, panels=2)
    f = projection.assignment.cpu()
    largest = torch.bincount(f).argsort(descending=True)[:_CLUSTERS].tolist()
    shown = torch.randperm(len(f), generator=torch.Generator().manual_seed(0))[:_POINTS]
    parts = (("rows of X", projection.x), ("their approximation", projection.approximation))
    for axes, (name, points) in zip(panels, parts, strict=True):
        points, which = points.cpu()[shown], f[shown]
        rest = ~torch.isin(which, torch.tensor(largest))
        axes.scatter(*points[rest].T, s=3, color="#cccccc", lw=0, label="all others")
        for number, cluster in enumerate(largest):
            axes.scatter(
                *points[which == cluster].T, s=6, lw=0, color=COLOURS[(number + 1) % len(COLOURS)],
                label=f"generator {cluster}",
            )  # fmt: skip
        axes.set_title(name)
        axes.set_xlabel(f"first component ({projection.explained[0]:.0%} of variance)")
        axes.set_ylabel(f"second component ({projection.explained[1]:.0%} of variance)")
    panels[1].set_xlim(panels[0].get_xlim())
    panels[1].set_ylim(panels[0].get_ylim())
    panels[1].legend(frameon=False, fontsize=8, markerscale=2)
    figure.suptitle(title)
    return figure


def errors(rows: Rows, title: str) -> Figure:
    """Relative error of each projection over the ratio, split into bias and noise.

    Args:
        rows: of one layer and one method, with ratio, layer and the three parts.
        title: of the figure.
    """
    names = list(dict.fromkeys(row["projection"] for row in rows))
    figure, axes = new_figure(8, 5)
    for number, name in enumerate(names):
        points = sorted((r for r in rows if r["projection"] == name), key=lambda r: r["ratio"])
        x, colour = [row["ratio"] for row in points], COLOURS[(number + 1) % len(COLOURS)]
        for part, style in (("total", "o-"), ("bias", "s--"), ("noise", "^:")):
            axes.plot(x, [row[part] for row in points], style, color=colour, ms=4,
                      label=f"{name}: {part}")  # fmt: skip
    _ratio_axis(axes, [row["ratio"] for row in rows])
    axes.set_ylabel(r"$\|\widetilde{\nabla W} - \nabla W\| \,/\, \|\nabla W\|$")
    axes.set_ylim(0, None)
    axes.set_title(title)
    axes.legend(frameon=False, fontsize=8, ncols=len(names))
    return figure


def over_tolerance(
    rows: Rows, value: str, label: str, title: str, logarithmic: bool = False
) -> Figure:
    """A value over epsilon, one line for each ratio; infinity at the right end."""
    finite = sorted({row["tolerance"] for row in rows if row["tolerance"] is not None})
    places = {tolerance: number for number, tolerance in enumerate([*finite, None])}
    figure, axes = new_figure(8, 5)
    ratios = sorted({row["ratio"] for row in rows}, reverse=True)
    for number, ratio in enumerate(ratios):
        points = sorted((places[r["tolerance"]], r[value]) for r in rows if r["ratio"] == ratio)
        axes.plot(*zip(*points, strict=True), "o-", ms=4, color=COLOURS[(number + 1) % 8],
                  label=f"r = {format_ratio(ratio)}")  # fmt: skip
    axes.set_xticks(range(len(places)), [*(f"{tolerance:g}" for tolerance in finite), "∞"])
    axes.set_xlabel("tolerance ε")
    axes.set_ylabel(label)
    axes.set_title(title)
    if logarithmic:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    else:
        axes.set_ylim(0, None)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def methods(rows: Rows, title: str) -> Figure:
    """Error of every method over the bytes that it holds, for one projection, and what of it is
    bias, where draws tell it from nothing.

    What holds nothing of X has no place on the axis: a line across, for each ratio.
    """
    figure, axes = new_figure(9, 5)
    for number, name in enumerate(dict.fromkeys(row["method"] for row in rows)):
        colour = COLOURS[(number + 1) % len(COLOURS)]
        of_it = [row for row in rows if row["method"] == name]
        if all(row["held_bytes_per_token"] < 0.1 for row in of_it):
            for row, style in zip(of_it, ("-", "--", ":"), strict=False):
                label = f"{name} {format_ratio(row['ratio'])}: nothing held"
                axes.axhline(row["total"], color=colour, ls=style, label=label)
            continue
        points = sorted((row["held_bytes_per_token"], row["total"]) for row in of_it)
        axes.plot(*zip(*points, strict=True), "o-", ms=4, color=colour, label=name)
        biased = sorted((row["held_bytes_per_token"], row["bias"]) for row in of_it if row["bias"])
        if len(biased) == len(points):
            axes.plot(*zip(*biased, strict=True), "o:", ms=4, mfc="white", color=colour,
                      label=f"{name}, bias")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    axes.set_xlabel("bytes held per token (log scale)")
    axes.set_ylabel("relative L2 error (log scale)")
    axes.set_title(title)
    axes.grid(alpha=0.25, which="both")
    figure.legend(frameon=False, fontsize=9, loc="outside right upper")
    return figure


def energy(rows: Rows, title: str) -> Figure:
    """What a share of X's directions, or of a layer's tokens, has of all."""
    figure, axes = new_figure(8, 5)
    for number, row in enumerate(rows):
        label = "X, in its best directions"
        if row["part"] != "x":
            label = f"G of {row['part']}, in its largest tokens"
        axes.plot(row["shares"], row["energy"], "o-", ms=4, color=COLOURS[number % len(COLOURS)],
                  label=label)  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = rows[0]["shares"]
    axes.set_xticks(ticks, [format_ratio(share) for share in ticks])
    axes.set_xlabel("share of directions, or of tokens (log scale)")
    axes.set_ylabel("share of the energy")
    axes.set_ylim(0, 1.02)
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def bound(rows: Rows, tokens: int, title: str) -> Figure:
    """Share of rows covered over k, with what Lemma 2 asks for and what full coverage took."""
    figure, axes = new_figure(8, 5)
    for number, row in enumerate(rows):
        colour = COLOURS[(number + 1) % len(COLOURS)]
        axes.plot(row["curve_k"], row["curve_coverage"], color=colour,
                  label=f"ε = {row['tolerance']:g}")  # fmt: skip
        axes.axvline(row["k_for_all"], color=colour, ls="--", lw=1)
        if row["k_bound"] <= tokens:
            axes.axvline(row["k_bound"], color=colour, ls=":", lw=1.5)
    axes.set_xscale("log")
    axes.set_xlim(1, tokens)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"generators k, of {tokens:,} tokens (log scale)")
    axes.set_ylabel("coverage: share of rows with a generator near enough")
    beyond = sum(row["k_bound"] > tokens for row in rows)
    axes.set_title(
        f"{title}\ndashed: k that covered all rows; dotted: Lemma 2's bound"
        + (f" (above all tokens for {beyond} of {len(rows)} ε)" if beyond else "")
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def density(rows: Rows, title: str) -> Figure:
    """b / n_min and b / median neighbourhood over b, one line for each epsilon."""
    figure, panels = new_figure(11, 4.5, panels=2)
    for axes, part, label in (
        (panels[0], "smallest", "b / n_min (smallest neighbourhood)"),
        (panels[1], "median", "b / median neighbourhood"),
    ):
        for number, tolerance in enumerate(sorted({row["tolerance"] for row in rows})):
            points = sorted((row["tokens"], row["tokens"] / row[part]) for row in rows
                            if row["tolerance"] == tolerance)  # fmt: skip
            axes.plot(*zip(*points, strict=True), "o-", ms=4, color=COLOURS[(number + 1) % 8],
                      label=f"ε = {tolerance:g}")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        axes.set_xlabel("tokens b (log scale)")
        axes.set_ylabel(f"{label} (log scale)")
        axes.grid(alpha=0.25)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    figure.suptitle(title)
    return figure


def complexity(rows: Rows, title: str) -> Figure:
    """How many times fewer multiplications, by the paper's gamma, and how many times less time."""
    figure, axes = new_figure(8, 5)
    points = sorted(rows, key=lambda row: row["k"])
    x = [row["k"] for row in points]
    axes.plot(x, [row["gamma"] for row in points], "s--", color=COLOURS[0], ms=4,
              label=r"multiplications, predicted: $\gamma$")  # fmt: skip
    axes.plot(x, [row["exact_us"] / row["pamm_us"] for row in points], "o-", color=COLOURS[1],
              ms=4, label="time, measured: exact / PAMM")  # fmt: skip
    axes.axhline(1, color="#888888", lw=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("generators k (log scale)")
    plain_numbers(axes.yaxis)
    axes.set_ylabel("exact over PAMM (log scale)")
    axes.set_title(title)
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    return figure


def _ratio_axis(axes: Any, ratios: Sequence[float]) -> None:
    ticks = sorted(set(ratios))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [format_ratio(ratio) for ratio in ticks])
    axes.minorticks_off()
    axes.set_xlabel("ratio r = k / b (log scale)")
    axes.grid(alpha=0.25)
