"""Fine-tuning on GLUE: an encoder, every task with every arm, tuned alike, with several seeds.

FOLDER/NAME/
    config.yaml                                     the run; another one here is refused
    runs/TASK/ARM/lr-LR_factor-F_seed-S/            checkpoints, metrics.jsonl, result.json
    results.jsonl table.md scores.png               a row for each task and arm; the comparison

A lock file in its folder says that a run is being trained: the same command may be given on
several machines that share the folder, and given again after whatever stopped it.
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from pamm.errors import ArmFailedError, PammError
from pamm.extras import require
from pamm.recipes.ablate import work
from pamm.recipes.files import lock, write_text
from pamm.recipes.finetune_settings import GlueConfig
from pamm.recipes.glue_plan import Plan
from pamm.recipes.glue_results import NOTE, markdown, picture, table
from pamm.recipes.glue_tasks import HUB, read_task
from pamm.recipes.ranks import processes
from pamm.recipes.study import FAILED

CONFIG = "config.yaml"
_MAY_GROW = ("tasks", "arms", "seeds")  # runs that are there stay what they are


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
        PammError: if data are missing or the folder is of another configuration.
        ArmFailedError: if trainings failed; the others are finished then.
        KeyboardInterrupt: once all workers have written their checkpoints, which are of whole
            epochs and of the step they stopped at.
    """
    if processes() > 1:
        raise PammError(
            "fine-tunings are small: each runs on one device, and several at a time. Give the "
            "command without torchrun or accelerate launch; it takes all GPUs in sight."
        )
    require("train", "transformers", "accelerate")
    require("plots", "matplotlib")
    folder = output / config.name
    plan = Plan(config, folder)
    _prepare(plan)
    todo = plan.to_do()
    console.print(f"{config.name}: {len(todo)} trainings can begin", highlight=False)
    if todo:
        work("pamm.recipes.glue_worker", folder, workers)
    rows = plan.rows()
    if rows:
        write_text(folder / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        write_text(folder / "table.md", markdown(rows))
        (folder / "scores.png").write_bytes(picture(rows))
        console.print(table(rows))
        console.print(NOTE, highlight=False)
        for name in ("results.jsonl", "table.md", "scores.png"):
            console.print(f"  {folder / name}", markup=False, highlight=False, soft_wrap=True)
    if failed := sorted(folder.glob(f"runs/*/*/*/{FAILED}")):
        raise ArmFailedError(
            f"{len(failed)} trainings failed; the first says in {failed[0]}: "
            f"{failed[0].read_text().strip().splitlines()[-1]}. The same command tries them again.",
            exit_code=1,
        )
    return rows


def _prepare(plan: Plan) -> None:
    config, folder = plan.config, plan.folder
    needs_factor = any(run.task == config.factor_task for run in plan.to_do())
    tasks = {*config.tasks, *([config.factor_task] if needs_factor else [])}
    if config.data != HUB:
        for task in sorted(tasks):
            read_task(task, config.data)  # whatever is wrong is found before anything is trained
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / ".lock", wait=True):
            _check_same(config, folder)
            for path in folder.glob(f"runs/*/*/*/{FAILED}"):
                path.unlink()
            write_text(folder / CONFIG, config.to_yaml())
    except OSError as error:
        raise PammError(
            f"cannot write in {folder}: {error.strerror}. Choose another output folder."
        ) from error


def _check_same(config: GlueConfig, folder: Path) -> None:
    """Raise unless what the folder holds goes on under this configuration.

    More tasks, arms and seeds are welcome. An arm of the same name must be the same arm.
    """
    if not (folder / CONFIG).exists():
        return
    there, wanted = GlueConfig.load(folder / CONFIG).to_dict(), config.to_dict()
    differing = [key for key in wanted if key not in _MAY_GROW and there[key] != wanted[key]]
    common = there["arms"].keys() & wanted["arms"].keys()
    differing += [
        f"arm {name!r}" for name in sorted(common) if there["arms"][name] != wanted["arms"][name]
    ]
    if differing:
        raise PammError(
            f"{folder} holds a run of another configuration; these differ: "
            f"{', '.join(differing)}. Choose another name, or remove that folder. Nothing in it "
            "was changed."
        )
