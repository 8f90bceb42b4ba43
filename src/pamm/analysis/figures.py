"""Figures of ``pamm analyze``: the paper's appendix on compression, on a model of your own."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from pamm.analysis.fidelity import Projection
from pamm.analysis.plots import COLOURS, new_figure, plain_numbers
from pamm.report import format_ratio

Rows = Sequence[dict[str, Any]]

_POINTS = 6000  # drawn of a cloud
_CLUSTERS = 7  # with a colour of their own
_PARTS = {"total": "o-", "bias": "s--", "noise": "^:"}  # of an error, and how each is drawn
_GREY = "#888888"


def of_layer(result: dict[str, Any], layer: int) -> dict[str, Figure]:
    """Every figure but ``pca``, which needs the rows themselves, from what ``analyze`` wrote."""
    rows = {
        key: [row for row in value if row["layer"] == layer]
        for key, value in result.items()
        if isinstance(value, list) and key != "layers"
    }
    where = f"layer {layer}, {result['tokens']:,} tokens"
    kept = [row for row in rows["errors"] if row["tolerance"] is None]
    return {
        "error-ratio": over_ratio(kept, f"Error of PAMM's weight gradient, ε = ∞: {where}"),
        "error-tolerance": errors(
            rows["errors"], result["draws"], f"Error of PAMM's weight gradient: {where}"
        ),
        "error-methods": methods(rows["methods"], f"Error of the weight gradient: {where}"),
        "energy": energy(rows["energy"], f"How uneven X and G are: {where}"),
        "coverage": coverage(rows["coverage"], f"Coverage: {where}"),
        "bound": bound(
            rows["bound"], rows["density"], f"Lemma 2, δ = {result['delta']:g}: {where}"
        ),
        "complexity": complexity(
            rows["complexity"], f"Weight gradient of q, k, v on {result['device']}: {where}"
        ),
    }


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


def over_ratio(rows: Rows, title: str) -> Figure:
    """Relative error over the ratio, split into bias and noise; a panel for each projection."""
    figure, panels = _panels(rows)
    for name, axes in panels.items():
        points = sorted((r for r in rows if r["projection"] == name), key=lambda r: r["ratio"])
        for number, (part, style) in enumerate(_PARTS.items()):
            axes.plot([row["ratio"] for row in points], [row[part] for row in points], style,
                      color=COLOURS[number], ms=4, label=part)  # fmt: skip
        ticks = [row["ratio"] for row in points]
        axes.set_xscale("log")
        axes.set_xticks(ticks, [format_ratio(ratio) for ratio in ticks], rotation=45)
        axes.minorticks_off()
        axes.set_xlabel("ratio r = k / b (log scale)")
        axes.set_ylabel("relative L2 error")
    for axes in panels.values():
        axes.set_ylim(0, None)  # once all is drawn: it fixes the upper end, which they share
    return _finish(figure, title)


def errors(rows: Rows, draws: int, title: str) -> Figure:
    """Relative error over epsilon, a line for each ratio: total, bias and noise below each other,
    projections side by side. A bias below the standard error of the draws' mean has no point.
    """
    told = [
        row if row["bias"] > row["noise"] / math.sqrt(draws) else {**row, "bias": math.nan}
        for row in rows
    ]
    names = list(dict.fromkeys(row["projection"] for row in rows))
    figure, panels = new_figure(
        3 + 3 * len(names), 8, len(names), len(_PARTS), sharex=True, sharey=True, squeeze=False
    )
    for part, beside in zip(_PARTS, panels, strict=True):
        for name, axes in zip(names, beside, strict=True):
            _over_tolerance(axes, [row for row in told if row["projection"] == name], part)
            axes.set_yscale("log")
            plain_numbers(axes.yaxis)
            axes.set_ylabel(f"{part} (log scale)")
            axes.set_title(name if part == "total" else "")
    figure.supylabel("relative L2 error")
    return _finish(figure, f"{title}\nbias is shown where {draws} draws tell it from none")


def coverage(rows: Rows, title: str) -> Figure:
    """Share of the rows kept over epsilon, one line for each ratio."""
    figure, axes = new_figure(8, 5)
    _over_tolerance(axes, rows, "coverage")
    axes.set_ylabel("coverage: share of rows kept")
    axes.set_ylim(0, None)
    axes.set_title(title)
    axes.legend(frameon=False)
    return figure


def methods(rows: Rows, title: str) -> Figure:
    """Error of every method over the bytes that it holds, and what of it is bias, where draws tell
    it from nothing; a panel for each projection.

    What holds nothing of X has no place on the axis: a line across, for each ratio.
    """
    figure, panels = _panels(rows)
    biased = {row["method"] for row in rows} - {r["method"] for r in rows if not r["bias"]}
    for projection, axes in panels.items():
        _methods(axes, [row for row in rows if row["projection"] == projection], biased)
    return _finish(figure, title)


def _methods(axes: Any, rows: Rows, biased: Collection[str]) -> None:
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
        if name in biased:
            points = sorted((row["held_bytes_per_token"], row["bias"]) for row in of_it)
            axes.plot(*zip(*points, strict=True), "o:", ms=4, mfc="white", color=colour,
                      label=f"{name}, bias")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    axes.set_xlabel("bytes held per token (log scale)")
    axes.set_ylabel("relative L2 error (log scale)")


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


def bound(rows: Rows, density: Rows, title: str) -> Figure:
    """Coverage over k; the k that Lemma 2 asks for beside the k it took; how dense the rows are.

    The lemma's argument holds for any part of the rows: with the median neighbourhood in place of
    the smallest, for the half with the larger ones. That says something where n_min is 1.
    """
    figure, (curves, needed, dense) = new_figure(14, 5.5, panels=3)
    rows = sorted(rows, key=lambda row: row["tolerance"])
    tokens = max(row["tokens"] for row in density)
    medians = {row["tolerance"]: row["median"] for row in density if row["tokens"] == tokens}
    half_bound, half_took = [], []
    for number, row in enumerate(rows):
        colour = COLOURS[(number + 1) % len(COLOURS)]
        k, covered = [*row["curve_k"], tokens], [*row["curve_coverage"], 1]
        curves.plot(k, covered, color=colour, label=f"ε = {row['tolerance']:g}")
        half_bound.append(row["k_bound"] * row["n_min"] / medians[row["tolerance"]])
        half_took.append(2 ** np.interp(0.5, covered, np.log2(k)))
        points = sorted((r["tokens"], r["median"], r["smallest"]) for r in density
                        if r["tolerance"] == row["tolerance"])  # fmt: skip
        b, median, smallest = np.array(points).T
        dense.plot(b, b / smallest, "--", color=_GREY, label="" if number else "n_min, of each ε")
        dense.plot(
            b, b / median, "o-", ms=4, color=colour, label=f"median, ε = {row['tolerance']:g}"
        )
    curves.set_xscale("log")
    curves.set_xlim(1, tokens)
    curves.set_ylim(0, 1.02)
    curves.set_xlabel("generators k (log scale)")
    curves.set_ylabel("coverage: share of rows with a generator near enough")

    tolerances = [row["tolerance"] for row in rows]
    for values, style, colour, label in (
        ([row["k_bound"] for row in rows], "s:", COLOURS[0], "all rows: Lemma 2"),
        ([row["k_for_all"] for row in rows], "o-", COLOURS[0], "all rows: measured"),
        (half_bound, "s:", COLOURS[6], "half of them: by the median"),
        (half_took, "o-", COLOURS[6], "half of them: measured"),
    ):
        face = "white" if style == "s:" else colour
        needed.plot(tolerances, values, style, color=colour, ms=5, mfc=face, label=label)
    needed.set_yscale("log")
    plain_numbers(needed.yaxis)
    needed.set_ylim(None, 2 * max(needed.get_ylim()[1], tokens))
    needed.axhspan(tokens, needed.get_ylim()[1], color=_GREY, alpha=0.2, lw=0,
                   label="above all tokens")  # fmt: skip
    needed.set_xticks(tolerances, [f"{tolerance:g}" for tolerance in tolerances])
    needed.set_xlabel("tolerance ε")
    needed.set_ylabel("generators k (log scale)")

    dense.set_xscale("log", base=2)
    dense.set_yscale("log")
    plain_numbers(dense.yaxis)
    dense.set_xlabel("tokens b (log scale)")
    dense.set_ylabel("b / size of a neighbourhood (log scale)")
    for axes in (curves, needed, dense):
        axes.grid(alpha=0.25)
        _legend_below(axes)
    alone = sum(row["n_min"] == 1 for row in rows)
    empty = sum(row["k_bound"] > tokens for row in rows)
    figure.suptitle(
        f"{title}\nn_min is 1 (some row has no neighbour) for {alone} of {len(rows)} ε; "
        f"the bound is above all tokens, and says nothing, for {empty} of {len(rows)}"
    )
    return figure


def complexity(rows: Rows, title: str) -> Figure:
    """Multiplications, as the paper counts them, time as measured, and the speed-up by each."""
    figure, (counts, times, faster) = new_figure(14, 5.5, panels=3)
    rows = sorted(rows, key=lambda row: row["k"])
    k = [row["k"] for row in rows]
    exact, pamm, exact_us, pamm_us = np.array(
        [
            (row["exact_multiplications"], sum(row["pamm_multiplications"].values()),
             row["exact_us"], row["pamm_us"])
            for row in rows
        ]
    ).T  # fmt: skip
    counts.plot(k, exact, "s-", ms=4, color=COLOURS[0], label="exact")
    counts.plot(k, pamm, "o-", ms=4, color=COLOURS[1], label="PAMM")
    for number, part in enumerate(rows[0]["pamm_multiplications"]):
        counts.plot(k, [row["pamm_multiplications"][part] for row in rows], "--", lw=1,
                    color=COLOURS[number + 2], label=f"PAMM: {part}")  # fmt: skip
    times.plot(k, exact_us, "s-", ms=4, color=COLOURS[0], label="exact")
    times.plot(k, pamm_us, "o-", ms=4, color=COLOURS[1], label="PAMM")
    faster.plot(k, [row["gamma"] for row in rows], "s:", ms=4, color=COLOURS[0],
                label=r"predicted: the paper's $\gamma$")  # fmt: skip
    faster.plot(k, exact / pamm, "s-", ms=4, color=COLOURS[2], label="predicted: all counted")
    faster.plot(k, exact_us / pamm_us, "o-", ms=4, color=COLOURS[1], label="measured")
    faster.axhline(1, color=_GREY, lw=1)
    for axes, label in (
        (counts, "multiplications"),
        (times, "measured time (µs)"),
        (faster, "exact over PAMM"),
    ):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(k, k)
        axes.minorticks_off()
        axes.set_xlabel("generators k (log scale)")
        axes.set_ylabel(f"{label} (log scale)")
        axes.grid(alpha=0.25)
        _legend_below(axes)
    plain_numbers(times.yaxis)
    plain_numbers(faster.yaxis)
    counted, took = max(pamm) / min(pamm), max(pamm_us) / min(pamm_us)
    figure.suptitle(
        f"{title}, {rows[0]['dtype']}\n"
        f"over these k PAMM's multiplications differ {counted:.2g}-fold, its time {took:.2g}-fold"
        + (": fixed costs, such as launching kernels, bind it" if took < counted / 2 else "")
    )
    return figure


def _panels(rows: Rows) -> tuple[Figure, dict[str, Any]]:
    """Axes side by side for each projection."""
    names = list(dict.fromkeys(row["projection"] for row in rows))
    figure, panels = new_figure(3 + 3 * len(names), 4.5, len(names), sharey=True, squeeze=False)
    for name, axes in zip(names, panels.flat, strict=True):
        axes.set_title(name)
    return figure, dict(zip(names, panels.flat, strict=True))


def _finish(figure: Figure, title: str) -> Figure:
    """Labels at the outside only, and one legend for all panels, which have the same lines."""
    for axes in figure.axes:
        axes.label_outer()
        axes.grid(alpha=0.25)
    lines = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    figure.legend([*lines.values()], [*lines], frameon=False, loc="outside right upper")
    figure.suptitle(title)
    return figure


def _legend_below(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _over_tolerance(axes: Any, rows: Rows, value: str) -> None:
    """A value over epsilon, one line for each ratio; infinity at the right end."""
    finite = sorted({row["tolerance"] for row in rows if row["tolerance"] is not None})
    places = {tolerance: number for number, tolerance in enumerate([*finite, None])}
    for number, ratio in enumerate(sorted({row["ratio"] for row in rows}, reverse=True)):
        points = sorted((places[r["tolerance"]], r[value]) for r in rows if r["ratio"] == ratio)
        axes.plot(*zip(*points, strict=True), "o-", ms=4, color=COLOURS[(number + 1) % 8],
                  label=f"r = {format_ratio(ratio)}")  # fmt: skip
    axes.set_xticks(range(len(places)), [*(f"{tolerance:g}" for tolerance in finite), "∞"])
    axes.set_xlabel("tolerance ε")
    axes.grid(alpha=0.25)
