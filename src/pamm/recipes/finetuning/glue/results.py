"""The table and the picture of fine-tunings: tasks beside each other, a line for each arm."""

from typing import Any

from rich import box
from rich.table import Table as TerminalTable

from pamm.recipes.finetuning.results import score_text
from pamm.recipes.table import Table
from pamm.report import format_bytes

NOTE = (
    "± is the standard deviation over seeds; * is below full fine-tuning by more than its own. "
    "Rates are chosen by the score they are compared in, for every arm alike."
)


def table(rows: list[dict[str, Any]]) -> TerminalTable:
    """Scores in %, one line a task and arm, for a terminal."""
    made = TerminalTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("task")
    made.add_column("arm", overflow="fold")
    for title in ("metric", "score", "seeds", "lr", "factor", "held"):
        made.add_column(title, justify="right")
    for row in rows:
        made.add_row(
            row["task"],
            row["arm"],
            row["metric"],
            score_text(row),
            str(row["seeds"]),
            f"{row['lr']:g}",
            f"{row['lr_factor']:g}",
            format_bytes(row["held_bytes"]),
        )
    return made


def summary(rows: list[dict[str, Any]]) -> Table:
    """The paper's table: an arm a line, a task a column, the mean, and the memory."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    heads = [f"{t} ({next(r['metric'] for r in rows if r['task'] == t)})" for t in tasks]
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = {row["task"]: row for row in rows if row["arm"] == arm}
        means = [mine[task]["mean"] for task in tasks if task in mine]
        complete = len(means) == len(tasks) and None not in means
        lines.append(
            [
                arm,
                format_bytes(max(row["held_bytes"] for row in mine.values())),
                *(score_text(mine[task]) if task in mine else "" for task in tasks),
                f"{100 * sum(means) / len(means):.2f}" if complete else "",
            ]
        )
    return Table("Scores in %", ["arm", "held, most", *heads, "mean"], lines)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The same, with the note."""
    return f"{summary(rows).markdown()}\n{NOTE}\n"


def picture(rows: list[dict[str, Any]]) -> bytes:
    """Means with their spread, and the single seeds: a panel with its own axis for each task."""
    from pamm.analysis.plots import colours, new_figure, png

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    shades = colours(list(dict.fromkeys(row["arm"] for row in rows)))
    figure, panels = new_figure(2.4 * len(tasks) + 1.6, 4, panels=len(tasks))
    for axes, task in zip([panels] if len(tasks) == 1 else panels, tasks, strict=True):
        ours = [row for row in rows if row["task"] == task and row["mean"] is not None]
        for row in ours:
            place = list(shades).index(row["arm"])
            mean, spread = 100 * row["mean"], 100 * (row["spread"] or 0.0)
            axes.errorbar(place, mean, spread, fmt="o", color=shades[row["arm"]], capsize=4)
            seeds = [100 * score for score in row["scores"] if score is not None]
            axes.plot([place] * len(seeds), seeds, "_", color="grey", ms=7)
        axes.set_xticks(range(len(shades)), shades, rotation=60, ha="right")
        axes.set_title(f"{task} ({ours[0]['metric']})" if ours else task)
        axes.grid(alpha=0.25, axis="y")
        axes.margins(0.15, 0.1)
    figure.supylabel("validation score (%)")
    figure.suptitle("Mean and standard deviation over seeds; a dash is one seed")
    return png(figure)
