"""The tables of ``pamm report``: what we found beside what the paper reports."""

from pathlib import Path
from typing import Any

from pamm.config import PammConfig, read_mapping
from pamm.recipes.pretraining.results import perplexity
from pamm.recipes.report.collect import Outcome, Progress
from pamm.recipes.table import Table
from pamm.report import format_bytes, format_ratio


def paper() -> dict[str, Any]:
    """The paper's numbers."""
    return read_mapping(Path(__file__).parent / "paper.yaml")


def by_source(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes of each run and each study, which can be compared with one another."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.source, []).append(outcome)
    return groups


def is_shape_study(outcomes: list[Outcome]) -> bool:
    """Whether batch or sequence differ, so that there is not one exact training for all."""
    return len({shape_of(outcome) for outcome in outcomes}) > 1


def exact_of(outcomes: list[Outcome]) -> Outcome | None:
    """Exact training, with one rate for all weights."""
    exact = (each for each in outcomes if each.method == "exact" and each.lr_factor == 1)
    return next(exact, None)


def results_table(outcomes: list[Outcome]) -> Table:
    """Perplexity, memory and speed of every outcome; the paper's where it has the same one."""
    numbers = paper()["pretrain"]
    published = numbers["sizes"].get(outcomes[0].size, {"rows": []})["rows"]
    baseline = next((row["perplexity"] for row in published if row["method"] == "exact"), None)
    exact, rows = exact_of(outcomes), []
    for outcome in outcomes:
        row = next((row for row in published if _is_same(outcome, row)), {})
        rows.append(
            [
                outcome.name,
                with_spread(outcome.perplexity, outcome.spread),
                _change(outcome.perplexity, exact.perplexity if exact else None, outcome is exact),
                with_spread(row["perplexity"], row.get("spread")) if row else "",
                _change(row.get("perplexity"), baseline, row.get("method") == "exact"),
                "" if outcome.paper_bytes is None else format_bytes(outcome.paper_bytes),
                f"{row['memory_mb']:g} MiB" if "memory_mb" in row else "",
                _held(outcome),
                _speed(outcome.tokens_per_second),
                _rate(outcome),
                str(outcome.seeds),
            ]
        )
    columns = [
        "training",
        "perplexity",
        "against exact",
        "paper: perplexity",
        "paper: against exact",
        "memory, paper's counting",
        "paper: memory",
        "held, measured",
        "tokens/s",
        "learning rate",
        "seeds",
    ]
    return Table(f"Ours, and the paper's: {numbers['source']}", columns, rows)


def tuning_table(outcomes: list[Outcome], progress: Progress) -> Table:
    """The trainings that rates were chosen from: of every cell, finished or not, at its best."""
    exact, rows = exact_of(outcomes), []
    best = {
        name: min(tried, key=lambda point: point[1])
        for name, tried in progress.tuning.items()
        if tried
    }
    level = perplexity(best[exact.name][1]) if exact and exact.name in best else None
    for name, (lr, loss) in best.items():
        tried = [rate for rate, _ in progress.tuning[name]]
        value = perplexity(loss)
        change = _change(value, level, exact is not None and name == exact.name)
        edge = " (edge)" if len(tried) > 1 and lr in (min(tried), max(tried)) else ""
        rates = ", ".join(f"{rate:.3g}" for rate in tried)
        rows.append([name, rates, f"{lr:.3g}{edge}", f"{value:.2f}", change])
    columns = ["training", "rates tried", "best", "perplexity there", "against exact"]
    return Table(f"Choice of the rates: {progress.tune_steps:,} steps, one seed", columns, rows)


def shape_table(outcomes: list[Outcome]) -> Table:
    """Exact against PAMM for each batch size and sequence length, and the paper's rows."""
    numbers, rows = paper()["shape"], []
    published = {(row["batch"], row["sequence"]): row for row in numbers["rows"]}
    for shape in dict.fromkeys(map(shape_of, outcomes)):
        ours = [outcome for outcome in outcomes if shape_of(outcome) == shape]
        exact, other = exact_of(ours), next((o for o in ours if o.method == "pamm"), None)
        theirs = published.get(shape, {})
        values = [
            with_spread(each.perplexity, each.spread) if each else "" for each in (exact, other)
        ]
        rows.append(
            [
                *map(str, shape),
                *values,
                _change(other and other.perplexity, exact and exact.perplexity),
                *(f"{theirs[key]:.2f}" if theirs else "" for key in ("exact", "pamm")),
                _change(theirs.get("pamm"), theirs.get("exact")),
            ]
        )
    columns = [
        *("batch", "sequence", "exact", "PAMM", "change"),
        *("paper: exact", "paper: PAMM", "paper: change"),
    ]
    return Table(f"Ours, and the paper's: {numbers['source']}", columns, rows)


def throughput_table(outcomes: list[Outcome]) -> Table:
    """Tokens per second of PAMM 1/512 and exact training, and the paper's."""
    numbers, rows = paper()["throughput"], []
    sizes = {size: (value["exact"], value["pamm"]) for size, value in numbers["sizes"].items()}
    for source, ours in by_source(outcomes).items():
        exact = exact_of(ours)
        pamm = next((o for o in ours if o.method == "pamm" and o.ratio == 1 / 512), None)
        if exact is None or pamm is None or is_shape_study(ours):
            continue
        theirs = sizes.get(exact.size)
        speeds = (exact.tokens_per_second, pamm.tokens_per_second)
        if None in speeds:
            continue
        rows.append(
            [
                f"{exact.size} ({source})",
                exact.device,
                *map(_speed, speeds),
                _change(speeds[1], speeds[0]),
                *(f"{speed:,}" for speed in theirs or ()),
                *([] if theirs is None else [_change(theirs[1], theirs[0])]),
                *([] if theirs else ["", "", ""]),
            ]
        )
    columns = [
        *("model", "device", "exact tokens/s", "PAMM 1/512 tokens/s", "change"),
        *("paper: exact", "paper: PAMM", "paper: change"),
    ]
    return Table(f"Ours, and the paper's: {numbers['source']}", columns, rows)


def scaling_table(outcomes: list[Outcome]) -> Table:
    """Tokens per second on several devices, and the share of as many times one device's."""

    def kind(outcome: Outcome) -> tuple[object, ...]:
        config = outcome.config
        return outcome.size, config.arms[0].config, config.tokens_per_pass, config.compile

    alone = {kind(each): each.tokens_per_second for each in outcomes if each.processes == 1}
    rows = []
    for outcome in (each for each in outcomes if each.processes > 1):
        one, speed = alone.get(kind(outcome)), outcome.tokens_per_second
        rows.append(
            [
                outcome.size,
                outcome.name,
                f"{outcome.processes} x {outcome.device}",
                "FSDP2" if outcome.config.fsdp else "DDP",
                f"{outcome.config.tokens_per_pass:,}",
                _speed(speed),
                "" if one is None or speed is None else f"{speed / one / outcome.processes:.1%}",
            ]
        )
    columns = [
        *("model", "training", "devices", "sharing", "tokens in a pass", "tokens/s"),
        "of ideal",
    ]
    return Table("Several devices", columns, rows)


def missing_table(outcomes: list[Outcome]) -> Table:
    """What the paper reports for sizes that none of our results is of."""
    numbers, rows = paper()["pretrain"], []
    for size, values in numbers["sizes"].items():
        if any(outcome.size == size for outcome in outcomes):
            continue
        for row in values["rows"]:
            name = row["method"] + (f" {row['ratio']}" if "ratio" in row else "")
            memory = f"{row['memory_mb']:g} MiB" if "memory_mb" in row else ""
            value = with_spread(row["perplexity"], row.get("spread"))
            rows.append([size, name, value, memory, f"{values['steps']:,}"])
    columns = ["model", "training", "perplexity", "memory", "steps"]
    return Table("The paper's alone: sizes that we did not run", columns, rows)


def bound_table(analysis: dict[str, Any]) -> Table:
    """Lemma 2's bound against what covered all rows."""
    rows = [
        [
            str(row["layer"]),
            f"{row['tolerance']:g}",
            f"{row['n_min']:,}",
            f"{row['k_bound']:,.0f}",
            f"{row['k_for_all']:,}",
        ]
        for row in analysis["bound"]
    ]
    columns = ["layer", "ε", "n_min", "k by Lemma 2", "k that covered all rows"]
    return Table(f"Coverage of {analysis['tokens']:,} tokens", columns, rows)


def with_spread(value: float | None, spread: float | None) -> str:
    """``30.12 ± 0.05``."""
    if value is None:
        return "not finite"
    return f"{value:,.2f}" + ("" if spread is None else f" ± {spread:.2g}")


def shape_of(outcome: Outcome) -> tuple[int, int]:
    """Sequences of a step, and tokens of each."""
    return outcome.config.sequences_per_step, outcome.config.sequence_length


def _is_same(outcome: Outcome, row: dict[str, Any]) -> bool:
    """Whether the paper's row is about this kind of training."""
    config = outcome.config.arms[0].config
    if row["method"] != config.method or outcome.layers != "q/k/v":
        return False
    if config.method == "exact":
        return outcome.lr_factor == 1
    return config.tolerance is None and config.ratio == PammConfig("pamm", row["ratio"]).ratio


def _held(outcome: Outcome) -> str:
    """As measured; what earlier trainings did not see (``held_bytes``), as computed."""
    if outcome.held_bytes == 0 < outcome.predicted_bytes:
        return f"{format_bytes(outcome.predicted_bytes)} (computed)"
    return format_bytes(outcome.held_bytes)


def _rate(outcome: Outcome) -> str:
    text = f"{outcome.lr:.3g}"
    if outcome.lr_factor != 1:
        text += f", {outcome.layers} x {outcome.lr_factor:g}"
    return text + (" (edge)" if outcome.at_edge else "")


def _speed(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _change(value: float | None, base: float | None, is_base: bool = False) -> str:
    if value is None or base is None or is_base:
        return ""
    return f"{value / base - 1:+.1%}"


def ratio_name(outcome: Outcome) -> str:
    """Of the figures' lines: method, and what else sets it apart from others of its ratio."""
    where = "" if outcome.layers == "q/k/v" else f" on {outcome.layers}"
    config = outcome.config.arms[0].config
    besides = f", {config.directions} directions" if config.directions else ""
    besides += ", 16 bits" if config.fp8 is False else ""
    factor = f", {outcome.layers} rate x {outcome.lr_factor:g}" if outcome.lr_factor != 1 else ""
    return f"{outcome.method}{where}{besides}{factor}"


def tolerance_name(outcome: Outcome) -> str:
    """Of the figure over tolerance: one line for each ratio."""
    return f"r = {format_ratio(outcome.ratio)}"
