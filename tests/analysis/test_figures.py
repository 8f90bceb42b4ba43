"""Every figure has labelled axes with units, and shows what it was given."""

from typing import Any

import numpy as np
import pytest
import torch

from pamm.analysis import figures, study_plots
from pamm.analysis.fidelity import Projection
from pamm.analysis.plots import png

RATIOS, TOLERANCES = (1 / 128, 1 / 512), (0.0, 0.5, None)
SCALES = {"q_proj": 0.1, "k_proj": 0.2, "v_proj": 0.3}


def rows() -> list[dict[str, Any]]:
    return [
        {
            **{"ratio": r, "tolerance": e, "projection": name},
            **{
                "total": 5 * scale,
                "bias": 0.4 * scale if e == 0 else 4 * scale,
                "noise": 3 * scale,
            },
        }
        for r in RATIOS
        for e in TOLERANCES
        for name, scale in SCALES.items()
    ]


BOUND = [
    {
        **{"tolerance": e, "n_min": n, "k_bound": 600 / n, "k_for_all": k},
        **{"curve_k": [1, 4, 16], "curve_coverage": [0, 0.5, 0.75]},
    }
    for e, n, k in ((0.9, 10, 50), (0.5, 1, 64))
]
DENSITY = [
    {"tolerance": e, "tokens": b, "smallest": 2, "median": b // part}
    for e, part in ((0.5, 4), (0.9, 2))
    for b in (8, 64)
]
COMPLEXITY = [
    {
        **{"k": k, "gamma": 100 / k, "exact_us": 5.0, "pamm_us": 10.0, "dtype": "bfloat16"},
        "exact_multiplications": 1000,
        "pamm_multiplications": {"similarities": 10 * k, "norms": 4},
    }
    for k in (8, 2, 4)
]
POINTS = torch.randn(50, 2)
MADE = {
    "pca": lambda: figures.pca(
        Projection(POINTS, POINTS, torch.arange(50) % 9, (0.5, 0.25)), "title"
    ),
    "ratio": lambda: figures.over_ratio([r for r in rows() if r["tolerance"] is None], "title"),
    "tolerance": lambda: figures.errors(rows(), 4, "title"),
    "coverage": lambda: figures.coverage(
        [{"ratio": r, "tolerance": e, "coverage": 0.5} for r in RATIOS for e in TOLERANCES], "title"
    ),
    "methods": lambda: figures.methods(
        [
            {"method": m, "projection": p, "held_bytes_per_token": b, "total": 1 / b, "bias": bias}
            for p in SCALES
            for m, bias in (("a", 0.5), ("b", 0.1 if p == "q_proj" else 0.0))
            for b in (1, 5)
        ],
        "title",
    ),
    "bound": lambda: figures.bound(BOUND, DENSITY, "title"),
    "complexity": lambda: figures.complexity(COMPLEXITY, "title"),
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
        beside = [
            other for other in figure.axes
            if other is axes or axes.get_shared_y_axes().joined(axes, other)
        ]  # fmt: skip
        below = [
            other for other in figure.axes
            if other is axes or axes.get_shared_x_axes().joined(axes, other)
        ]  # fmt: skip
        x = next(other.get_xlabel() for other in below if other.get_xlabel())
        y = next(other.get_ylabel() for other in beside if other.get_ylabel())
        assert min(len(x), len(y)) >= 5
        assert (axes.get_xscale() == "log") == ("log scale" in x)
        assert (axes.get_yscale() == "log") == ("log scale" in y)
    assert figure.get_suptitle() or any(axes.get_title() for axes in figure.axes)


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
    axes = MADE["tolerance"]().axes[-1]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "0.5", "∞"]


def test_errors_have_a_panel_for_each_projection_and_part() -> None:
    figure = MADE["tolerance"]()
    panels = np.array(figure.axes).reshape(3, 3)
    assert [axes.get_title() for axes in panels[0]] == [*SCALES]
    for beside, part, error in zip(panels, ("total", "bias", "noise"), (5, 4, 3), strict=True):
        assert beside[0].get_ylabel().startswith(part)
        for axes, scale in zip(beside, SCALES.values(), strict=True):
            assert len(axes.lines) == len(RATIOS)
            for line in axes.lines:
                assert line.get_ydata()[1:] == pytest.approx([error * scale] * 2)
                # Below the standard error of four draws there is no point.
                assert np.isnan(line.get_ydata()[0]) == (part == "bias")
    assert "where 4 draws tell it" in figure.get_suptitle()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["r = 1/128", "r = 1/512"]


def test_errors_over_the_ratio_are_split_for_each_projection() -> None:
    for axes, scale in zip(MADE["ratio"]().axes, SCALES.values(), strict=True):
        drawn = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
        assert drawn == pytest.approx({"total": 5 * scale, "bias": 4 * scale, "noise": 3 * scale})
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > 5 * max(SCALES.values()), "no panel's lines are cut off"


def test_a_methods_bias_is_drawn_where_every_projection_has_one() -> None:
    for axes in MADE["methods"]().axes:
        assert [line.get_label() for line in axes.lines] == ["a", "a, bias", "b"]


def test_a_bound_that_says_nothing_is_shown_as_such_beside_one_for_half_of_the_rows() -> None:
    figure = MADE["bound"]()
    assert "n_min is 1 (some row has no neighbour) for 1 of 2" in figure.get_suptitle()
    assert "the bound is above all tokens, and says nothing, for 1 of 2" in figure.get_suptitle()
    _, needed, dense = figure.axes
    assert {line.get_label(): list(line.get_ydata()) for line in needed.lines} == {
        "all rows: Lemma 2": [600, 60],
        "all rows: measured": [64, 50],
        "half of them: by the median": [600 / 16, 600 / 32],
        "half of them: measured": pytest.approx([4, 4]),
    }
    (above,) = needed.patches
    assert above.get_y() == 64
    medians = [line.get_ydata() for line in dense.lines if "median" in str(line.get_label())]
    assert [list(values) for values in medians] == [[4, 4], [2, 2]]


def test_multiplications_are_drawn_beside_the_time_and_both_speed_ups() -> None:
    figure = MADE["complexity"]()
    counts, times, faster = (
        {line.get_label(): list(line.get_ydata()) for line in axes.lines} for axes in figure.axes
    )
    assert counts == {
        "exact": [1000] * 3,
        "PAMM": [24, 44, 84],
        "PAMM: similarities": [20, 40, 80],
        "PAMM: norms": [4] * 3,
    }
    assert times == {"exact": [5] * 3, "PAMM": [10] * 3}
    assert faster["predicted: the paper's $\\gamma$"] == [50, 25, 12.5]
    assert faster["predicted: all counted"] == pytest.approx([1000 / 24, 1000 / 44, 1000 / 84])
    assert faster["measured"] == [0.5] * 3
    assert "multiplications differ 3.5-fold, its time 1-fold: fixed costs" in figure.get_suptitle()


def test_time_that_follows_the_multiplications_is_not_put_down_to_launches() -> None:
    rows = [{**row, "pamm_us": float(row["k"])} for row in COMPLEXITY]
    assert "fixed costs" not in figures.complexity(rows, "title").get_suptitle()
