"""What happens beside the training steps of an arm: metrics and a progress bar."""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pamm.recipes.files import finite, read_json_lines, write_text
from pamm.recipes.pretraining.results import perplexity

_UNREAD_S = 2.0  # how long losses stay on an accelerator: reading one waits for all of its work

Line = dict[str, Any]
"""What is known of a step, or of a validation."""


class MetricsCallback(TrainerCallback):
    """Writes one JSON object for each step and each validation to a file.

    Steps have loss, lr, tokens (seen so far) and seconds (spent in steps so far; not in validation,
    nor saving). Validations have eval_loss and perplexity. Losses of several steps are read from an
    accelerator at once, and these steps share their time evenly.

    It must come behind whatever asks the Trainer to save: no line may be missing in a checkpoint.

    Args:
        path: of the file.
        tokens_per_step: for the column ``tokens``.
        resumed_step: lines of later steps are dropped: those steps are done again.
        step_loss: gives the loss of the step that was just done.
        listeners: are told every line, too.
    """

    def __init__(
        self,
        path: Path,
        tokens_per_step: int,
        resumed_step: int,
        step_loss: Callable[[], Tensor],
        listeners: Sequence[Callable[[Line], None]] = (),
    ) -> None:
        kept = [line for line in read_json_lines(path) if line["step"] <= resumed_step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._tokens_per_step = tokens_per_step
        self._seconds = max((line.get("seconds", 0.0) for line in kept), default=0.0)
        self._step_loss, self._listeners = step_loss, listeners
        self._unread: list[tuple[int, float, Tensor]] = []
        self._start = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock; note the learning rate."""
        if not self._unread:
            self._start = time.perf_counter()
        self._lr = kwargs["lr_scheduler"].get_last_lr()[0]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the loss; read it at once where that costs nothing, or where all must be written."""
        self._unread.append((state.global_step, self._lr, self._step_loss()))
        if (
            args.device.type == "cpu"
            or time.perf_counter() - self._start > _UNREAD_S
            or control.should_save
            or control.should_evaluate
            or control.should_training_stop
        ):
            self._read()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write a validation's line."""
        loss = kwargs["logs"].get("eval_loss")
        if loss is not None:
            values = {"eval_loss": finite(loss), "perplexity": finite(perplexity(loss))}
            self._write({"step": state.global_step, **values})
            self._file.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> None:
        """Write the lines of all steps whose losses are still on the device."""
        losses = torch.stack([loss for _, _, loss in self._unread]).tolist()  # waits for the device
        each = (time.perf_counter() - self._start) / len(losses)
        for (step, lr, _), loss in zip(self._unread, losses, strict=True):
            self._seconds += each
            self._write(
                {
                    "step": step,
                    "loss": finite(loss),
                    "lr": lr,
                    "tokens": step * self._tokens_per_step,
                    "seconds": round(self._seconds, 6),
                }
            )
        self._file.flush()
        self._unread.clear()

    def _write(self, line: Line) -> None:
        self._file.write(json.dumps(line) + "\n")
        for listener in self._listeners:
            listener(line)


def to_board(board: SummaryWriter) -> Callable[[Line], None]:
    """A listener that passes lines on to TensorBoard."""

    def add(line: Line) -> None:
        names = {"loss": "train/loss", "lr": "train/lr", "eval_loss": "eval/loss"}
        for key, name in names.items():
            if line.get(key) is not None:
                board.add_scalar(name, line[key], line["step"])

    return add


class ProgressCallback(TrainerCallback):
    """A bar with the latest loss, and a line for each validation.

    Args:
        console: where to.
        title: of the bar.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps  {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task(title, total=None, loss="")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar, at the step that a resumed run is at."""
        self._progress.update(self._task, total=state.max_steps, completed=state.global_step)
        self._progress.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move it."""
        self._progress.update(self._task, completed=state.global_step)

    def show(self, line: Line) -> None:
        """Show the loss; print a validation's perplexity."""
        if "loss" in line:
            loss = math.nan if line["loss"] is None else line["loss"]
            self._progress.update(self._task, loss=f"loss {loss:.3f}")
        else:
            value = math.inf if line["perplexity"] is None else line["perplexity"]
            self._progress.console.print(
                f"  step {line['step']:,}: validation perplexity {value:.2f}", highlight=False
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class NoLastCheckpoint(TrainerCallback):
    """Leaves out the checkpoint that the Trainer writes after the last step."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take back what the Trainer asked for."""
        if state.global_step >= state.max_steps:
            control.should_save = False
