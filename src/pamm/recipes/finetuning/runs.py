"""What every fine-tuning recipe does around its trainings: the folder, the workers, the failures.

FOLDER/NAME/
    config.yaml                                     the run; another one here is refused
    runs/TASK/ARM/lr-LR_factor-F_seed-S/            checkpoints, metrics.jsonl, result.json
    results.jsonl                                   a row for each task and arm

A lock file in its folder says that a run is being trained: the same command may be given on
several machines that share the folder, and given again after whatever stopped it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from pamm.errors import PammError
from pamm.extras import require
from pamm.recipes.checkpoints import remove_checkpoints
from pamm.recipes.console import show_error
from pamm.recipes.files import CONFIG, lock, write_text, writing_in
from pamm.recipes.finetuning.plan import FinetuneRun, Plan
from pamm.recipes.finetuning.settings import FinetuneConfig
from pamm.recipes.ranks import processes, rank
from pamm.recipes.stop import Stop
from pamm.recipes.workers import work, work_off

Train = Callable[[FinetuneRun, Stop], bool]
"""Trains one run; False if it was stopped before it was finished."""


def run_plan(
    plan: Plan[Any],
    worker: str,
    check: Callable[[], None],
    console: Console,
    workers: int | None,
    together: Train | None = None,
) -> list[dict[str, Any]]:
    """Train all runs of a plan, or what is left of them; returns the rows of what is finished.

    Args:
        plan: the runs.
        worker: module that ``work`` starts.
        check: finds whatever is wrong before anything is trained, or written.
        console: shows what is done.
        workers: processes at a time; one for each GPU in sight by default, or one on the CPU.
        together: trains a run in all processes of a launcher; ``None`` refuses to be launched.

    Raises:
        PammError: from ``check``, or if the folder is of another configuration.
        KeyboardInterrupt: once all workers have written their checkpoints, which are of whole
            epochs and of the step they stopped at.
    """
    require("train", "transformers", "accelerate")
    require("plots", "matplotlib")
    if processes() > 1 and together is not None:
        _train_together(plan, check, together, console)
        return plan.rows()
    if processes() > 1:
        raise PammError(
            "these fine-tunings run on one device each, and several at a time. Give the command "
            "without torchrun or accelerate launch; it takes all GPUs in sight."
        )
    check()
    _prepare(plan)
    todo = plan.to_do()
    console.print(f"{plan.config.name}: {len(todo)} trainings can begin", highlight=False)
    if todo:
        work(worker, plan.folder, workers)
    return plan.rows()


def serve(plan: Callable[[], Plan[Any]], train: Train) -> int:
    """What a worker's process does: one open run after the other.

    Returns:
        Its exit code: 0 done, 2 refused, 130 stopped with a checkpoint.
    """
    stop = Stop()
    stop.listen()
    try:
        return work_off(plan().to_do, lambda run: None, lambda run: train(run, stop), stop)
    except PammError as error:
        show_error(error)
        return 2


def _train_together(
    plan: Plan[Any], check: Callable[[], None], train: Train, console: Console
) -> None:
    """One run after the other in the processes of a launcher; the first one writes.

    An error in one process ends it, and so the launcher ends all; the same command goes on.
    """
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    stop = Stop()
    stop.listen()
    if rank() == 0:
        check()
        _prepare(plan)
    state.wait_for_everyone()
    while todo := plan.to_do():
        run = todo[0]
        state.wait_for_everyone()  # all have seen what is to be done
        with ExitStack() as held:
            if rank() == 0:
                run.folder.mkdir(parents=True, exist_ok=True)
                if not held.enter_context(lock(run.folder / ".lock")):
                    raise PammError(f"another process trains {run.folder}. Wait until it ends.")
            if not train(run, stop):
                raise KeyboardInterrupt
        if rank() == 0:
            remove_checkpoints(run.folder)
            console.print(f"{run.title}: {run.note}", markup=False, highlight=False)
        state.wait_for_everyone()


def _prepare(plan: Plan[Any]) -> None:
    config, folder = plan.config, plan.folder
    with writing_in(folder), lock(folder / ".lock", wait=True):
        _check_same(config, folder)
        for path in plan.failed():
            path.unlink()
        write_text(folder / CONFIG, config.to_yaml())


def _check_same(config: FinetuneConfig, folder: Path) -> None:
    """Raise unless what the folder holds goes on under this configuration.

    More arms and seeds (and tasks) are welcome. An arm of the same name must be the same arm.
    """
    if not (folder / CONFIG).exists():
        return
    there, wanted = type(config).load(folder / CONFIG).to_dict(), config.to_dict()
    differing = [key for key in wanted if key not in config.may_grow and there[key] != wanted[key]]
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
