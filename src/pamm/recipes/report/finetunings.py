"""Fine-tunings in ``pamm report``: their own tables and pictures, and the paper's lines."""

from pathlib import Path
from typing import Any

from pamm.recipes.finetuning.glue import results as glue
from pamm.recipes.finetuning.glue.settings import GlueConfig
from pamm.recipes.finetuning.vlm import results as vlm
from pamm.recipes.report.collect import Finetuning
from pamm.recipes.report.tables import paper
from pamm.recipes.table import Table


def title(name: str, study: Finetuning) -> str:
    """What was trained, and on what; of paths the last part, which is the same on all machines."""
    data = "GLUE" if _is_glue(study) else Path(study.config.data).name
    return f"{name}: {Path(study.config.model).name} on {data}"


def text(study: Finetuning) -> list[str]:
    """What the table says, and how far the paper's lines can be compared with ours."""
    devices = ", ".join(dict.fromkeys(row["device"] for row in study.rows))
    recipe, numbers = (glue, paper()["glue"]) if _is_glue(study) else (vlm, paper()["vlm"])
    return [
        f"{study.config.epochs:g} epoch(s), on {devices}. {recipe.NOTE}",
        f"Lines of the paper are of {numbers['of']}; where our model or data are others, only "
        f"differences from exact training can be compared. {numbers['note']}",
    ]


def table(study: Finetuning) -> Table:
    """The fine-tuning's own table, and below its lines the paper's, in the same columns."""
    return glue_table(study.rows) if _is_glue(study) else vlm_table(study.rows)


def glue_table(rows: list[dict[str, Any]]) -> Table:
    """An arm a line; of the paper the tasks that were run here, so that means can be compared."""
    numbers = paper()["glue"]
    metrics = {row["task"]: row["metric"] for row in rows}
    theirs = [
        {
            "task": task,
            "arm": f"paper: {row['arm']}",
            "metric": metric,
            "mean": row["scores"][task] / 100,
            "spread": None,
            "held_bytes": round(row["memory_mb"] * 2**20),
        }
        for row in numbers["rows"]
        for task, metric in metrics.items()
    ]
    made = glue.summary([*rows, *theirs])
    return Table(f"Ours, and the paper's: {numbers['source']}", made.columns, made.rows)


def vlm_table(rows: list[dict[str, Any]]) -> Table:
    """An arm a line; the paper's lines have some of the columns."""
    numbers, made = paper()["vlm"], vlm.summary(rows)
    theirs = [
        [f"paper: {row['arm']}", *(str(row.get(column, "")) for column in made.columns[1:])]
        for row in numbers["rows"]
    ]
    title = f"Ours, and the paper's: {numbers['source']}"
    return Table(title, made.columns, [*made.rows, *theirs])


def pictures(name: str, study: Finetuning) -> dict[str, bytes]:
    """Those that the fine-tuning wrote, by a name that says what is on them."""
    return {f"{name} {path.stem}": path.read_bytes() for path in sorted(study.folder.glob("*.png"))}


def _is_glue(study: Finetuning) -> bool:
    return isinstance(study.config, GlueConfig)
