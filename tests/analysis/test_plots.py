import io

import matplotlib.colors
import matplotlib.image

from pamm.analysis import plots

TRAINING = {"exact": [(i, 7 - i / 50) for i in range(1, 101)], "pamm": [(i, 7.0) for i in range(9)]}
VALIDATION = {"exact": [(50, 6.1), (100, 5.1)], "pamm": [(50, 6.4)]}


def test_every_arm_keeps_its_colour_in_both_figures() -> None:
    colours = plots.colours(["exact", "pamm"])
    (axes,) = plots.loss_curves(TRAINING, VALIDATION, 1_000_000).axes
    labelled = {
        line.get_label(): line.get_color() for line in axes.lines if line.get_marker() == "o"
    }
    assert labelled == colours
    (bars,) = plots.memory_bars({"exact": 4 << 20, "pamm": 5000}).axes
    faces = [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in bars.patches]
    assert faces == list(colours.values())


def test_axes_are_labelled_with_units_and_steps_become_tokens() -> None:
    (axes,) = plots.loss_curves(TRAINING, VALIDATION, 2_000_000).axes
    assert axes.get_xlabel() == "tokens seen (millions)"
    assert axes.get_ylabel() == "loss (nats a token)"
    points = next(line for line in axes.lines if line.get_label() == "exact")
    assert list(points.get_xdata()) == [100, 200]
    assert list(points.get_ydata()) == [6.1, 5.1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["exact", "pamm"]


def test_training_loss_is_a_running_mean() -> None:
    (axes,) = plots.loss_curves(TRAINING, VALIDATION, 1_000_000).axes
    thin = axes.lines[0]
    assert len(thin.get_xdata()) == 99  # of windows of two
    assert thin.get_ydata()[0] == (TRAINING["exact"][0][1] + TRAINING["exact"][1][1]) / 2


def test_bars_carry_their_bytes_on_a_log_scale() -> None:
    (axes,) = plots.memory_bars({"exact": 4 << 20, "pamm": 5000, "none": 0}).axes
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.texts] == ["4.00 MiB", "4.88 KiB", "0 B"]


def test_arms_without_points_are_drawn_without_a_line() -> None:
    figure = plots.loss_curves({"exact": []}, {}, 1000)
    assert all(len(line.get_xdata()) == 0 for axes in figure.axes for line in axes.lines)
    assert plots.png(figure).startswith(b"\x89PNG")


def test_png_is_a_picture_of_the_figure() -> None:
    picture = matplotlib.image.imread(io.BytesIO(plots.png(plots.memory_bars({"exact": 1000}))))
    assert picture.shape[1] == 8 * 150
    assert picture.std() > 0.01
