"""The grid runner: one training after the other, or several at a time, one on each GPU.

FOLDER/NAME/
    study.yaml                            the study as it was last asked for
    data/                                 tokenizer and tokens, the same for all runs
    runs/CELL/lr-LR_seed-SEED/            run.yaml, metrics.jsonl, tensorboard, result.json
    runs/CELL/lr-LR_seed-SEED_steps-N/    a shorter one, which chooses the rate
    results.json                          a row for each cell

A lock file in its folder says that a run is being trained. So the same command may be given on
several machines that share the folder, and given again after whatever stopped it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from pamm.errors import PammError
from pamm.extras import require
from pamm.recipes.files import FAILED, lock, write_json, write_text, writing_in
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.ranks import processes
from pamm.recipes.studies.study import Run, Study
from pamm.recipes.workers import raise_failed, work
from pamm.report import format_bytes

STUDY, DATA, RESULTS = "study.yaml", "data", "results.json"
RUN = "run.yaml"
_WHERE_TEXT_IS = ("text", "validation")  # it may lie elsewhere on another machine


def ablate(
    study: Study, output: Path, console: Console, workers: int | None = None
) -> list[dict[str, Any]]:
    """Train all of a study, or what is left of it; write and print its results.

    Args:
        study: what to train.
        output: folder of all studies; this one is in ``output / study.name``.
        console: shows what is done.
        workers: processes at a time; one for each GPU in sight by default, or one on the CPU.

    Raises:
        PammError: if the folder holds runs of the same names and other configurations, or under
            a launcher of several processes.
        ArmFailedError: if trainings failed; the others are finished then.
        KeyboardInterrupt: once all workers have written their checkpoints.
    """
    require("train", "transformers", "accelerate", "tokenizers", "tensorboard")
    if processes() > 1:
        raise PammError(
            "the trainings of a study run on one device each, and several at a time. Give the "
            "command without torchrun or accelerate launch; it takes all GPUs in sight."
        )
    folder = output / study.name
    _prepare(study, folder, console)
    todo = study.to_do(folder)
    console.print(f"{study.name}: {len(study.cells)} cells, {len(todo)} trainings can begin")
    if todo:
        work("pamm.recipes.studies.worker", folder, workers)
    rows = study.summary(folder)
    write_json(folder / RESULTS, rows)
    console.print(table(rows))
    console.print(f"  {folder / RESULTS}", markup=False, highlight=False, soft_wrap=True)
    raise_failed(sorted(folder.glob(f"runs/*/*/{FAILED}")))
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """Results for a terminal; ``±`` is the standard deviation over seeds."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("cell", overflow="fold")
    for title in ("perplexity", "lr", "seeds", "held"):
        made.add_column(title, justify="right")
    for row in rows:
        value, spread = row["perplexity"], row["spread"]
        text = "not finite" if value is None else f"{value:,.2f}"
        made.add_row(
            row["cell"],
            text if spread is None else f"{text} ± {spread:.2f}",
            f"{row['lr']:.3g}" + (" (edge)" if row["lr_at_edge"] else ""),
            str(row["seeds"]),
            format_bytes(row["held_bytes"]),
        )
    return made


def check_run(run: Run) -> None:
    """Raise unless what the run's folder holds is of this configuration."""
    path = run.folder / RUN
    if path.exists() and _identity(PretrainConfig.load(path)) != _identity(run.config):
        raise PammError(
            f"{run.folder} holds a run of another configuration. Give the study another name, or "
            "remove that folder. Nothing in it was changed."
        )


def _identity(config: PretrainConfig) -> dict[str, Any]:
    values = config.to_dict()
    return {key: value for key, value in values.items() if key not in _WHERE_TEXT_IS}


def _prepare(study: Study, folder: Path, console: Console) -> None:
    from pamm.recipes.pretraining.model import llama_config
    from pamm.recipes.pretraining.tokens import prepare

    with writing_in(folder), lock(folder / ".lock", wait=True):
        for cell in study.cells:
            for run in (*study.tuning(folder, cell), *study.final(folder, cell)):
                check_run(run)
                (run.folder / FAILED).unlink(missing_ok=True)
        begun = any(folder.glob(f"runs/*/*/{RUN}"))
        tokens = prepare(study.longest(), folder / DATA, console, begun=begun)
        for cell in study.cells:  # refuses models that cannot be built
            llama_config(study.run(folder, cell, study.lrs[0], study.seeds[0]).config, tokens)
        values = dataclasses.asdict(study) | {"lrs": [*study.lrs], "seeds": [*study.seeds]}
        write_text(folder / STUDY, yaml.safe_dump(values, sort_keys=False))
