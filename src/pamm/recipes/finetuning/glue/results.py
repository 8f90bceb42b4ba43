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
    """Means with their spread, arms side by side for each task, as PNG."""
    from pamm.analysis.plots import colours, new_figure, png

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure, axes = new_figure(max(6.0, 1.6 * len(tasks)), 4)
    for number, (arm, colour) in enumerate(colours(arms).items()):
        shift = 0.7 * ((number + 0.5) / len(arms) - 0.5)
        mine = [row for row in rows if row["arm"] == arm and row["mean"] is not None]
        axes.errorbar(
            [tasks.index(row["task"]) + shift for row in mine],
            [100 * row["mean"] for row in mine],
            [100 * (row["spread"] or 0.0) for row in mine],
            fmt="o", color=colour, capsize=3, label=arm,
        )  # fmt: skip
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("score (%)")
    axes.set_title("Validation score by task: mean and standard deviation over seeds")
    axes.grid(alpha=0.25, axis="y")
    axes.legend(frameon=False)
    return png(figure)
