"""The pictures of a run or a study, as far as what was trained gives them."""

import math
from collections.abc import Callable

from matplotlib.figure import Figure

from pamm.analysis import study_plots
from pamm.analysis.plots import png
from pamm.analysis.study_plots import Point
from pamm.recipes.pretraining.results import perplexity
from pamm.recipes.report.collect import Curve, Outcome, Tuning
from pamm.recipes.report.tables import (
    exact_of,
    is_shape_study,
    ratio_name,
    shape_of,
    tolerance_name,
)


def pictures(source: str, outcomes: list[Outcome], tuning: Tuning) -> dict[str, bytes]:
    """PNG files, by a name that says what is on them."""
    shapes = is_shape_study(outcomes)
    made = _shapes(source, outcomes) if shapes else _curves(source, outcomes)
    exact = None if shapes else exact_of(outcomes)
    level = None if exact is None else _point(0, exact)
    kept = [each for each in outcomes if each.method != "exact" and each.tolerance is None]
    paper_form = [each for each in kept if each.method == "pamm"]
    if len({each.ratio for each in paper_form}) > 1 and not shapes:
        made["ratio"] = study_plots.with_errors(
            _series(paper_form, ratio_name, lambda each: each.ratio),
            level, "ratio r = k / b (log scale)", f"Perplexity over the ratio: {source}",
            ratios=True,
        )  # fmt: skip
    holding = [
        each for each in kept if _bytes_per_token(each)
    ]  # others have no place on a log axis
    if len({each.method for each in holding}) > 1:
        made["bytes"] = study_plots.with_errors(
            _series(holding, ratio_name, _bytes_per_token), level,
            "bytes held per token and block (log scale)", f"Perplexity over bytes held: {source}",
        )  # fmt: skip
    by_tolerance = [each for each in outcomes if each.method == "pamm"]
    values = {each.tolerance for each in by_tolerance}
    if len(values) > 1:
        order = sorted(values, key=lambda value: float("inf") if value is None else value)
        made["tolerance"] = study_plots.with_errors(
            _series(
                by_tolerance, tolerance_name,
                lambda each: order.index(each.tolerance),
            ),
            level, "tolerance ε", f"Perplexity over the tolerance: {source}",
            ticks=["∞" if value is None else f"{value:g}" for value in order],
        )  # fmt: skip
    if any(tuning.values()):
        cells = {name: points for name, points in tuning.items() if points}
        finite = {
            name: [point for point in points if point[1] < float("inf")]
            for name, points in cells.items()
        }
        made["rates"] = study_plots.rates(
            {name: points for name, points in finite.items() if points},
            f"Choice of the learning rate: {source}",
        )
    return {f"{source} {name}": png(figure) for name, figure in made.items()}


def _curves(source: str, outcomes: list[Outcome]) -> dict[str, Figure]:
    """Losses over tokens, of validation and of training; perplexity over time."""
    size = outcomes[0].config.tokens_per_step
    seen, loss = "tokens seen (millions)", "loss (nats a token)"

    def over_tokens(points: Curve) -> list[tuple[float, float]]:
        return [(step * size / 1e6, value) for step, value in points]

    validation = {each.name: over_tokens(each.curve) for each in outcomes if each.curve}
    training = {each.name: over_tokens(each.training) for each in outcomes if each.training}
    time = {
        each.name: [
            (step * size / each.tokens_per_second / 60, perplexity(value))
            for step, value in each.curve
        ]
        for each in outcomes
        if each.curve and each.tokens_per_second
    }
    made = {}
    if validation:
        made["loss"] = study_plots.curves(
            validation, seen, f"validation {loss}", f"Validation loss: {source}"
        )
    if training:
        made["training"] = study_plots.curves(
            training, seen, f"training {loss}, running mean", f"Training loss: {source}"
        )
    if len(time) > 1:
        made["time"] = study_plots.curves(
            time, "minutes of training, at the median step's speed", "validation perplexity",
            f"Perplexity over time, {outcomes[0].device}: {source}",
        )  # fmt: skip
    return made


def _shapes(source: str, outcomes: list[Outcome]) -> dict[str, Figure]:
    """Perplexity of every method by batch and sequence, the fewest tokens a step first."""
    order = sorted(set(map(shape_of, outcomes)), key=lambda shape: (math.prod(shape), shape))
    figure = study_plots.with_errors(
        _series(outcomes, lambda each: each.method, lambda each: order.index(shape_of(each))),
        None, "sequences of a step x tokens of each", f"Perplexity by batch and sequence: {source}",
        ticks=[f"{batch} x {sequence:,}" for batch, sequence in order],
    )  # fmt: skip
    return {"shape": figure}


def _series(
    outcomes: list[Outcome], name: Callable[[Outcome], str], place: Callable[[Outcome], float]
) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    for outcome in outcomes:
        if outcome.perplexity is not None:
            series.setdefault(name(outcome), []).append(_point(place(outcome), outcome))
    return series


def _point(place: float, outcome: Outcome) -> Point:
    value = float("nan") if outcome.perplexity is None else outcome.perplexity
    return place, value, outcome.spread or 0.0


def _bytes_per_token(outcome: Outcome) -> float:
    assert isinstance(outcome.config.model, dict)
    blocks = outcome.config.model["num_hidden_layers"]
    held = outcome.held_bytes or outcome.predicted_bytes
    return held / outcome.config.tokens_per_pass / blocks
