"""Fine-tuning of a vision-language model: images by class, every arm tuned alike, several seeds.

The folder is that of ``finetuning.runs``, with table.md, f1.png and a confusion-ARM.png for each
arm. Images that are drawn lie beside it, in drawn-images.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from pamm.extras import require
from pamm.recipes.finetuning.plan import FinetuneRun, Plan, mean_and_spread
from pamm.recipes.finetuning.results import show_results
from pamm.recipes.finetuning.runs import run_plan
from pamm.recipes.finetuning.vlm.results import NOTE, confusion_picture, markdown, picture, table
from pamm.recipes.finetuning.vlm.settings import DRAWN, VlmConfig
from pamm.recipes.ranks import rank
from pamm.recipes.settings import Arm
from pamm.recipes.stop import Stop
from pamm.recipes.workers import raise_failed

TASK = "images"


class VlmPlan(Plan[VlmConfig]):
    """The runs of a fine-tuning on images."""

    columns = ("classes", "towers", "held_bytes", "exact_bytes", "trained_parameters")

    def __init__(self, config: VlmConfig, folder: Path) -> None:
        super().__init__(config, folder, {TASK: "macro F1"}, TASK, (TASK,))

    @property
    def data(self) -> Path:
        """Folder of the images."""
        drawn = self.folder.parent / "drawn-images"
        return drawn if self.config.data == DRAWN else Path(self.config.data)

    def train(self, run: FinetuneRun, stop: Stop) -> bool:
        """Train one run; see ``training.train_run``."""
        from pamm.recipes.finetuning.vlm.training import train_run

        return train_run(self.config, str(self.data), run, stop)

    def _row(
        self, task: str, arm: Arm, runs: list[FinetuneRun], results: list[dict[str, Any]]
    ) -> dict[str, Any]:
        row = super()._row(task, arm, runs, results)
        matrices = [result["confusion"] for result in results if result["confusion"] is not None]
        befores = [result["before"] for result in results if result["before"] is not None]
        return {
            **row,
            "weighted_f1": mean_and_spread([result["weighted_f1"] for result in results]),
            "before": befores[0] if befores else None,
            "confusion": _sum(matrices) if matrices else None,
        }


def finetune_vlm(
    config: VlmConfig, output: Path, console: Console, workers: int | None = None
) -> list[dict[str, Any]]:
    """Train all runs, or what is left of them; write and print the comparison.

    In the processes of torchrun or ``accelerate launch`` each run is trained by all of them, with
    ``batch_size`` images for each in a forward pass; otherwise each run by one process.

    Args:
        config: the fine-tuning.
        output: folder of all of them; this one is in ``output / config.name``.
        console: shows what is done.
        workers: processes at a time; one for each GPU in sight by default, or one on the CPU.

    Returns:
        A row for each arm: macro F1 (``mean``, ``spread``, ``scores``) and ``weighted_f1`` over
        seeds, the ``confusion`` of all seeds, chosen rates, bytes held in each of ``towers``.

    Raises:
        PammError: if images are missing, the model cannot be loaded, or the folder is of another
            configuration.
        ArmFailedError: if trainings failed; the others are finished then.
        KeyboardInterrupt: see ``runs.run_plan``.
    """
    plan = VlmPlan(config, output / config.name)
    rows = run_plan(
        plan,
        "pamm.recipes.finetuning.vlm.worker",
        lambda: check(plan),
        console,
        workers,
        plan.train,
    )
    if rows and rank() == 0:
        files: dict[str, str | bytes] = {"table.md": markdown(rows), "f1.png": picture(rows)}
        for arm in config.arms:
            row = next((row for row in rows if row["arm"] == arm.name), None)
            if row is not None and row["confusion"] is not None:
                files[f"confusion-{arm.folder}.png"] = confusion_picture(row)
        show_results(plan.folder, rows, table(rows), NOTE, files, console)
    raise_failed(plan.failed())
    return rows


def check(plan: VlmPlan) -> None:
    """Find what would end every training before the first one begins; draw images if asked to."""
    require("train", "PIL")
    if plan.config.lora is not None:
        require("peft", "peft")
    plan.config.from_scratch  # noqa: B018  # reads the file
    if plan.config.data == DRAWN:
        _draw(plan.data)
    from pamm.recipes.finetuning.vlm.image_folder import read_images

    images, _ = read_images(plan.data, plan.config.validation_share)
    if not plan.is_finished:
        from pamm.recipes.finetuning.vlm.model import load, vision_tower
        from pamm.recipes.finetuning.vlm.questions import Questions

        processor, model = load(plan.config, images.classes, bf16=False, device="meta")
        Questions(processor, images.classes, plan.config.image_size)
        vision_tower(model)


def _draw(folder: Path) -> None:
    """All images or none: another process may be at it too, and draws the same."""
    from pamm.recipes.finetuning.vlm.drawn_images import draw_folder

    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".drawn-", dir=folder.parent))
    try:
        draw_folder(partial)
        os.rename(partial, folder)
    except OSError:
        shutil.rmtree(partial)
        if not folder.exists():
            raise


def _sum(matrices: list[list[list[int]]]) -> list[list[int]]:
    return [
        [sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)
    ]
