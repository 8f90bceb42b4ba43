"""What happens beside the training steps of an arm: metrics, a progress bar, a clean stop."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pamm.recipes.files import read_json_lines, write_text
from pamm.recipes.stop import Stop


class MetricsCallback(TrainerCallback):
    """Writes one JSON object for each step and each validation to a file.

    Steps have loss, lr, tokens (seen so far) and seconds (spent in steps so far: forward, backward
    and optimizer; not validation, nor saving). Validations have eval_loss and perplexity.

    Args:
        path: of the file.
        tokens_per_step: for the column ``tokens``.
        resumed_step: lines of later steps are dropped: those steps are done again.
    """

    def __init__(self, path: Path, tokens_per_step: int, resumed_step: int) -> None:
        kept = [line for line in read_json_lines(path) if line["step"] <= resumed_step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._tokens_per_step = tokens_per_step
        self._seconds = max((line.get("seconds", 0.0) for line in kept), default=0.0)
        self._start = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop it; kernels of a GPU run on after the call that started them."""
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        self._seconds += time.perf_counter() - self._start

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write a line."""
        logs, step = kwargs["logs"], state.global_step
        if "loss" in logs:
            line = {
                "step": step,
                "loss": finite(logs["loss"]),
                "lr": logs["learning_rate"],
                "tokens": step * self._tokens_per_step,
                "seconds": round(self._seconds, 6),
            }
        elif "eval_loss" in logs:
            loss = logs["eval_loss"]
            line = {"step": step, "eval_loss": finite(loss), "perplexity": finite(perplexity(loss))}
        else:
            return
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the file."""
        self._file.close()


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

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the loss; print a validation's perplexity."""
        logs = kwargs["logs"]
        if "loss" in logs:
            self._progress.update(self._task, loss=f"loss {logs['loss']:.3f}")
        elif "eval_loss" in logs:
            self._progress.console.print(
                f"  step {state.global_step:,}: validation perplexity "
                f"{perplexity(logs['eval_loss']):.2f}",
                highlight=False,
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class StopCallback(TrainerCallback):
    """Ends training after the current step, with a checkpoint, once ``stop`` is asked to.

    Of several processes it is enough to ask one: all end after the same step.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask the Trainer to save and to stop."""
        asked = self._stop.asked
        if args.world_size > 1:
            flag = torch.tensor(int(asked), device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            asked = bool(flag)
        if asked:
            control.should_save = True
            control.should_training_stop = True


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


def finite(number: float) -> float | None:
    """None in place of NaN and infinity, which JSON has not."""
    return number if math.isfinite(number) else None
