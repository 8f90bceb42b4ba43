"""Every figure has labelled axes with units, and shows what it was given."""

from typing import Any

import pytest
import torch

from pamm.analysis import figures, study_plots
from pamm.analysis.fidelity import Projection
from pamm.analysis.plots import png

RATIOS, TOLERANCES = (1 / 128, 1 / 512), (0.0, 0.5, None)


def rows() -> list[dict[str, Any]]:
    return [
        {"ratio": r, "tolerance": e, "projection": name, "total": 0.5, "bias": 0.4, "noise": 0.3}
        for r in RATIOS
        for e in TOLERANCES
        for name in ("q_proj", "k_proj")
    ]


BOUND = [
    {"tolerance": e, "k_for_all": k, "k_bound": b, "curve_k": [1, 100], "curve_coverage": [0, 1]}
    for e, k, b in ((0.5, 50, 1e6), (0.9, 5, 90))
]
DENSITY = [
    {"tolerance": e, "tokens": b, "smallest": 2, "median": b // 4}
    for e in (0.5, 0.9)
    for b in (8, 64)
]
POINTS = torch.randn(50, 2)
MADE = {
    "pca": lambda: figures.pca(
        Projection(POINTS, POINTS, torch.arange(50) % 9, (0.5, 0.25)), "title"
    ),
    "errors": lambda: figures.errors([r for r in rows() if r["tolerance"] is None], "title"),
    "tolerance": lambda: figures.over_tolerance(rows()[::2], "total", "relative error", "title"),
    "methods": lambda: figures.methods(
        [
            {"method": m, "held_bytes_per_token": b, "total": 1 / b, "bias": bias / b}
            for m, bias in (("a", 0.5), ("b", 0.0))
            for b in (1, 5)
        ],
        "title",
    ),
    "bound": lambda: figures.bound(BOUND, 100, "title"),
    "density": lambda: figures.density(DENSITY, "title"),
    "complexity": lambda: figures.complexity(
        [{"k": k, "gamma": 100 / k, "exact_us": 5.0, "pamm_us": k} for k in (2, 4, 8)], "title"
    ),
    "with errors": lambda: study_plots.with_errors(
        {"pamm": [(1 / 128, 30, 0.5), (1 / 512, 31, 0.4)]}, (0, 28, 0.2),
        "ratio (log scale)", "title",
        ratios=True,
    ),
    "ticks": lambda: study_plots.with_errors(
        {"r = 1/512": [(0, 40, 0.5), (1, 31, 0.4)]}, None, "tolerance", "title", ticks=["0", "∞"]
    ),
    "curves": lambda: study_plots.curves(
        {"exact": [(10, 5.0), (20, 4.0)], "pamm": [(10, 5.5)]}, "tokens", "loss (nats)", "title"
    ),
    "rates": lambda: study_plots.rates({"exact": [(1e-3, 4.0), (2e-3, 3.5)]}, "title"),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_axes_are_labelled(name: str) -> None:
    figure = MADE[name]()
    assert png(figure).startswith(b"\x89PNG")
    for axes in figure.axes:
        assert len(axes.get_xlabel()) >= 5
        assert len(axes.get_ylabel()) >= 5
        assert (axes.get_xscale() == "log") == ("log scale" in axes.get_xlabel())
        assert (axes.get_yscale() == "log") == ("log scale" in axes.get_ylabel())
    assert any(axes.get_title() for axes in figure.axes) or figure.get_suptitle() == "title"


def test_error_bars_and_the_level_of_exact_training_are_drawn() -> None:
    (axes,) = MADE["with errors"]().axes
    (bar,) = axes.containers
    assert bar.has_yerr
    low, high = bar.lines[1][0].get_ydata(), bar.lines[1][1].get_ydata()
    assert list(low) == [30.6, 29.5]
    assert list(high) == [31.4, 30.5]
    assert axes.lines[0].get_ydata()[0] == 28
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1/512", "1/128"]


def test_infinity_is_at_the_right_end_of_tolerances() -> None:
    (axes,) = MADE["tolerance"]().axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "0.5", "∞"]


def test_a_bound_above_all_tokens_is_said_and_not_drawn() -> None:
    (axes,) = MADE["bound"]().axes
    assert "above all tokens for 1 of 2" in axes.get_title()
    dotted = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert dotted == [90]
