"""Figures of studies: perplexity over ratio, tolerance and bytes, curves, tuning of rates."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from pamm.analysis.plots import COLOURS, new_figure, plain_numbers
from pamm.report import format_ratio

Point = tuple[float, float, float]
"""Where, value, half an error bar."""

_STYLES = ("o-", "s--", "^:", "D-.")
_MARKED = 40  # points of a line
_WITHIN = 5  # names in a legend


def with_errors(
    series: Mapping[str, Sequence[Point]],
    level: Point | None,
    x_label: str,
    title: str,
    *,
    ratios: bool = False,
    ticks: Sequence[str] | None = None,
) -> Figure:
    """Perplexity with error bars; exact training as a band.

    Args:
        series: points of every line, by its name.
        level: of exact training; its place is not looked at.
        x_label: what is along the axis, with its unit.
        title: of the figure.
        ratios: whether places are ratios, for the axis.
        ticks: names of the places 0, 1, 2, ...; without them the axis is logarithmic.
    """
    figure, axes = new_figure(8, 5)
    if level is not None:
        _, value, half = level
        axes.axhline(value, color=COLOURS[0], lw=1.2, label="exact")
        axes.axhspan(value - half, value + half, color=COLOURS[0], alpha=0.12, lw=0)
    for number, (name, points) in enumerate(series.items()):
        x, y, half = zip(*sorted(points), strict=True)
        style = _STYLES[number // (len(COLOURS) - 1) % len(_STYLES)]
        axes.errorbar(x, y, yerr=half, fmt=style, ms=5, lw=1.4, capsize=3,
                      color=COLOURS[1 + number % (len(COLOURS) - 1)], label=name)  # fmt: skip
    if ticks is not None:
        axes.set_xticks(range(len(ticks)), list(ticks))
    else:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    if ratios:
        places = sorted({point[0] for points in series.values() for point in points})
        axes.set_xticks(places, [format_ratio(place) for place in places])
        axes.minorticks_off()
    axes.set_xlabel(x_label)
    spread = any(half for points in series.values() for _, _, half in points)
    bars = " (bars: standard deviation over seeds)" if spread else ""
    axes.set_ylabel(f"validation perplexity{bars}")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    return figure


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str, title: str
) -> Figure:
    """What became of the arms over tokens or time; steep beginnings go beyond the upper edge.

    Args:
        lines: points of every arm, by its name; few are marked, many are a line.
        x_label: what is along the axis, with its unit.
        y_label: the same, upwards.
        title: of the figure.
    """
    figure, axes = new_figure(8, 5)
    for number, (name, points) in enumerate(lines.items()):
        style = _STYLES[number // len(COLOURS) % len(_STYLES)]
        few = len(points) <= _MARKED
        axes.plot(*zip(*points, strict=True), style if few else style[1:], ms=3.5,
                  lw=1.4 if few else 1.0, color=COLOURS[number % len(COLOURS)],
                  label=name)  # fmt: skip
    ends = [points[-1][1] for points in lines.values()]
    starts = [points[len(points) // 8][1] for points in lines.values()]
    low, high = min(ends), max(*starts, *ends)
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(alpha=0.25)
    _legend(figure, axes)
    return figure


def rates(tuning: Mapping[str, Sequence[tuple[float, float]]], title: str) -> Figure:
    """Loss of every cell over the learning rate; its best rate is filled."""
    figure, axes = new_figure(8, 5)
    for number, (name, points) in enumerate(tuning.items()):
        colour = COLOURS[number % len(COLOURS)]
        style = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, style, marker="o", mfc="white", ms=5, lw=1.2, color=colour, label=name)
        best = min(points, key=lambda point: point[1])
        axes.plot(*best, "o", ms=6, color=colour)
    places = sorted({rate for points in tuning.values() for rate, _ in points})
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:.3g}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel("peak learning rate (log scale)")
    axes.set_ylabel("validation loss (nats a token)")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    _legend(figure, axes)
    return figure


def _legend(figure: Figure, axes: Any) -> None:
    """Beside the axes where it is long: within, it would lie on lines."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > _WITHIN:
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right upper")
    else:
        axes.legend(frameon=False, fontsize=9)
