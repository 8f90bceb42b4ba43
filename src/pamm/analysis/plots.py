"""Figures of a comparison: loss curves and memory bars; what all figures share."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from pamm.report import format_bytes

COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito's, told apart by colour-blind readers too; black for the first arm, which others
are compared with."""


def colours(arms: Sequence[str]) -> dict[str, str]:
    """One colour for each arm, by its place; the same in every figure of a run."""
    return {arm: COLOURS[number % len(COLOURS)] for number, arm in enumerate(arms)}


def loss_curves(
    training: Mapping[str, Sequence[tuple[int, float]]],
    validation: Mapping[str, Sequence[tuple[int, float]]],
    tokens_per_step: int,
) -> Figure:
    """Loss against tokens seen: training as thin smoothed lines, validation as points.

    Args:
        training: (step, loss in nats a token) of every arm.
        validation: the same, of validations.
        tokens_per_step: turns steps into tokens.
    """
    figure, axes = new_figure(8, 5)
    millions = tokens_per_step / 1e6
    for number, (arm, colour) in enumerate(colours(list(training)).items()):
        line = "o-" if number < len(COLOURS) else "o--"  # colours repeat
        steps, losses = _columns(training[arm])
        window = max(1, len(losses) // 50)
        axes.plot(
            steps[window - 1 :] * millions, _mean(losses, window), color=colour, alpha=0.45, lw=1
        )
        steps, losses = _columns(validation.get(arm, ()))
        axes.plot(steps * millions, losses, line, color=colour, lw=1.8, ms=4, label=arm)
    axes.set_xlabel("tokens seen (millions)")
    axes.set_ylabel("loss (nats a token)")
    axes.set_title("Validation loss (points) and training loss (thin lines, running mean)")
    highest = [points[-1][1] for points in validation.values() if points]
    lowest = min(highest, default=0.0)
    if finite := [first for curve in training.values() for _, first in curve[:1]]:
        axes.set_ylim(lowest - 0.05 * (max(finite) - lowest), None)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure


def memory_bars(held: Mapping[str, int]) -> Figure:
    """Bytes held for backward in place of the q/k/v inputs, one bar an arm, on a log scale."""
    figure, axes = new_figure(8, 1.2 + 0.55 * len(held))
    arms, values = list(held), [max(count, 1) for count in held.values()]
    bars = axes.barh(arms, values, color=list(colours(arms).values()), height=0.6)
    axes.bar_label(bars, [format_bytes(count) for count in held.values()], padding=5)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 4, max(values) * 8)  # room for the labels
    ticks = [
        2.0**power for power in range(0, 60, 4) if min(values) / 4 < 2**power < max(values) * 8
    ]
    axes.set_xticks(ticks, [format_bytes(tick).replace(".00", "") for tick in ticks])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.set_xlabel("bytes held for backward, all q/k/v inputs of one forward pass (log scale)")
    axes.set_title("What is kept in place of the attention inputs")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def speed_bars(speeds: Mapping[str, Mapping[str, float]]) -> Figure:
    """Tokens per second against exact training, in per cent more or less.

    Args:
        speeds: for each case, each arm's speed over that of exact training.
    """
    arms = list(dict.fromkeys(arm for case in speeds.values() for arm in case))
    most = max((len(case) for case in speeds.values()), default=1)
    figure, axes = new_figure(max(6, 1.2 + 0.32 * most * len(speeds)), 4.5)
    width = 0.9 / max(most, 1)
    palette = colours(["exact", *arms])
    for arm in arms:
        cases = [(place, case) for place, case in enumerate(speeds.values()) if arm in case]
        values = [100 * (case[arm] - 1) for _, case in cases]
        # Around the tick, without gaps for arms that were not measured there.
        left = [place + width * ([*case].index(arm) - (len(case) - 1) / 2) for place, case in cases]
        bars = axes.bar(left, values, width, color=palette[arm], label=arm)
        axes.bar_label(bars, [f"{value:+.1f}" for value in values], padding=2, fontsize=7)
    axes.axhline(0, color="black", lw=1)
    axes.set_xticks(range(len(speeds)), list(speeds))
    axes.set_ylabel("tokens/s against exact training (%)")
    axes.set_title("Whole training steps of LLaMA shapes")
    axes.margins(y=0.15)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def png(figure: Figure) -> bytes:
    """The picture, as the content of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def new_figure(
    width: float, height: float, panels: int = 1, rows: int = 1, **how: Any
) -> tuple[Figure, Any]:
    """A figure and its axes; with several panels an array of them, side by side.

    ``how`` is for ``Figure.subplots``: what they share.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, and without pyplot's global state
    return figure, figure.subplots(rows, panels, **how)


def plain_numbers(axis: Any) -> None:
    """2, 5 and 10 on a logarithmic axis, in place of powers of ten; 10 alone on a long one."""
    low, high = axis.get_data_interval()
    is_long = 0 < 1e4 * low < high
    axis.set_major_locator(LogLocator(subs=(1,) if is_long else (1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _columns(points: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(points, dtype=float).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _mean(values: np.ndarray, window: int) -> np.ndarray:
    return np.convolve(values, np.full(window, 1 / window), mode="valid") if len(values) else values
