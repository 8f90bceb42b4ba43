"""Fine-tuning on GLUE: an encoder, every task with every arm, tuned alike, with several seeds.

The folder is that of ``finetuning.runs``, with table.md and scores.png: the comparison.
"""

from pathlib import Path
from typing import Any

from rich.console import Console

from pamm.recipes.finetuning.glue.results import NOTE, markdown, picture, table
from pamm.recipes.finetuning.glue.settings import GlueConfig
from pamm.recipes.finetuning.glue.tasks import HUB, TASKS, read_task
from pamm.recipes.finetuning.plan import Plan
from pamm.recipes.finetuning.results import show_results
from pamm.recipes.finetuning.runs import run_plan
from pamm.recipes.workers import raise_failed


class GluePlan(Plan[GlueConfig]):
    """The runs of a fine-tuning on GLUE."""

    columns = (
        *("held_bytes", "predicted_bytes", "paper_bytes", "held_tokens", "generators"),
        "padding_share",
    )

    def __init__(self, config: GlueConfig, folder: Path) -> None:
        metrics = {name: task.metric for name, task in TASKS.items()}
        super().__init__(config, folder, metrics, config.factor_task, config.tasks)


def finetune_glue(
    config: GlueConfig, output: Path, console: Console, workers: int | None = None
) -> list[dict[str, Any]]:
    """Train all runs, or what is left of them; write and print the comparison.

    Args:
        config: the fine-tuning.
        output: folder of all of them; this one is in ``output / config.name``.
        console: shows what is done.
        workers: processes at a time; one for each GPU in sight by default, or one on the CPU.

    Returns:
        A row for each task and arm: mean, spread and scores, chosen rates, bytes held.

    Raises:
        PammError: if data are missing, the model cannot be loaded, or the folder is of another
            configuration.
        ArmFailedError: if trainings failed; the others are finished then.
        KeyboardInterrupt: see ``runs.run_plan``.
    """
    plan = GluePlan(config, output / config.name)
    rows = run_plan(
        plan, "pamm.recipes.finetuning.glue.worker", lambda: check(plan), console, workers
    )
    if rows:
        files = {"table.md": markdown(rows), "scores.png": picture(rows)}
        show_results(plan.folder, rows, table(rows), NOTE, files, console)
    raise_failed(plan.failed())
    return rows


def check(plan: GluePlan) -> None:
    """Find what would end every training before the first one begins."""
    config = plan.config
    needs_factor = any(run.task == config.factor_task for run in plan.to_do())
    tasks = {*config.tasks, *([config.factor_task] if needs_factor else [])}
    if config.data != HUB:
        for task in sorted(tasks):
            read_task(task, config.data)
    if not plan.is_finished:
        from pamm.recipes.finetuning.glue.training import load

        load(config.model, TASKS[config.tasks[0]], "meta")
