"""A clean stop of the Transformers Trainer."""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pamm.recipes.stop import Stop


class StopCallback(TrainerCallback):
    """Ends training after the current step, with a checkpoint, once ``stop`` is asked to.

    Of several processes it is enough to ask one: all end after the same step.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._group: Any = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask the Trainer to save and to stop."""
        asked = self._stop.asked
        if args.world_size > 1:
            if self._group is None:  # between hosts: a GPU would have to end its work to tell
                self._group = torch.distributed.new_group(backend="gloo")
            flag = torch.tensor(int(asked))
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self._group)
            asked = bool(flag)
        if asked:
            control.should_save = True
            control.should_training_stop = True
