"""The table and the pictures of fine-tunings on images: a line, or a picture, for each arm."""

from typing import Any

from rich import box
from rich.table import Table as TerminalTable

from pamm.recipes.finetuning.results import score_text
from pamm.recipes.table import Table

NOTE = (
    "F1 in %; ± is the standard deviation over seeds; * is below exact training by more than its "
    "own. Rates are chosen by the macro F1 of the validation images, for every arm alike. k: "
    "generators in the language model and in the vision tower. Memory: q/k/v inputs of one forward "
    "pass, measured, against exact training of the same weights."
)
_COLUMNS = ["arm", "macro F1", "weighted F1", "seeds", "lr", "k", "held MB", "saved MB", "saved %"]


def table(rows: list[dict[str, Any]]) -> TerminalTable:
    """One line an arm, for a terminal."""
    made = TerminalTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column(_COLUMNS[0], no_wrap=True)
    for title in _COLUMNS[1:]:
        made.add_column(title, justify="right")
    for line in summary(rows).rows:
        made.add_row(*line)
    return made


def markdown(rows: list[dict[str, Any]]) -> str:
    """The same, with the note."""
    return f"{summary(rows).markdown()}\n{NOTE}\n"


def summary(rows: list[dict[str, Any]]) -> Table:
    """The same, as text."""
    made = []
    before = next((row["before"] for row in rows if row["before"] is not None), None)
    if before is not None:
        scores = [score_text(_alone(before[key])) for key in ("score", "weighted_f1")]
        made.append(["before training", *scores, *[""] * (len(_COLUMNS) - 3)])
    for row in rows:
        held, exact = row["held_bytes"], row["exact_bytes"]
        counts = [row["towers"][name]["generators"] for name in ("language", "vision")]
        is_less = held != exact
        made.append(
            [
                row["arm"],
                score_text(row),
                score_text(row["weighted_f1"]),
                str(row["seeds"]),
                f"{row['lr']:g}" + (" (edge)" if row["lr_at_edge"] else ""),
                " + ".join("-" if k is None else str(k) for k in counts) if any(counts) else "",
                f"{held / 1e6:,.3f}",
                f"{(exact - held) / 1e6:,.3f}" if is_less else "",
                f"{100 * (1 - held / exact):.2f}" if is_less else "",
            ]
        )
    return Table("F1 in %", [*_COLUMNS], made)


def _alone(score: float) -> dict[str, Any]:
    return {"mean": score, "spread": None}


def picture(rows: list[dict[str, Any]]) -> bytes:
    """Macro and weighted F1 of each arm: every seed, and the mean with its spread; as PNG."""
    from pamm.analysis.plots import colours, new_figure, png

    arms = [row["arm"] for row in rows]
    figure, axes = new_figure(max(5.0, 1.6 * len(arms)), 4)
    for place, (row, colour) in enumerate(zip(rows, colours(arms).values(), strict=True)):
        if row["mean"] is None:
            continue
        axes.plot([place - 0.2] * len(row["scores"]), [100 * s for s in row["scores"]], ".",
                  color=colour, alpha=0.5)  # fmt: skip
        for shift, marker, score in ((-0.1, "o", row), (0.1, "s", row["weighted_f1"])):
            axes.errorbar(
                [place + shift], [100 * score["mean"]], [100 * (score["spread"] or 0.0)],
                fmt=marker, color=colour, capsize=3,
            )  # fmt: skip
    axes.set_xticks(range(len(arms)), arms)
    axes.set_ylabel("F1 (%)")
    axes.set_title("Macro (circles; dots: seeds) and weighted F1 (squares)")
    axes.grid(alpha=0.25, axis="y")
    return png(figure)


def confusion_picture(row: dict[str, Any]) -> bytes:
    """Which class (row) was taken for which (column), over all seeds, as PNG."""
    import numpy as np

    from pamm.analysis.plots import new_figure, png

    counts, names = np.array(row["confusion"]), row["classes"]
    shares = counts / counts.sum(axis=1, keepdims=True).clip(1)
    side = 2.5 + 0.45 * len(names)
    figure, axes = new_figure(side + 1, side)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, j in zip(*counts.nonzero(), strict=True):
        colour = "white" if shares[i, j] > 0.5 else "black"
        axes.text(j, i, str(counts[i, j]), ha="center", va="center", color=colour, fontsize=7)
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("answer")
    axes.set_ylabel("class")
    axes.set_title(f"{row['arm']}: {row['seeds']} seed(s)")
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the class")
    return png(figure)
