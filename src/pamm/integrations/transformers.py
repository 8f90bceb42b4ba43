"""Transformers: a callback that converts the model of a ``Trainer`` (and of TRL's trainers)."""

import logging
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pamm.config import PammConfig
from pamm.nn import groups
from pamm.recompute import recomputed_groups
from pamm.report import Report
from pamm.surgery import Selector, convert, seek

_log = logging.getLogger(__name__)


class PammCallback(TrainerCallback):
    """Converts the Trainer's model when the Trainer is made, and positions the draws at each step.

    So a run resumed from a checkpoint draws the generators that the uninterrupted run would have
    drawn. Checkpoints hold nothing of PAMM: they are those of the exact model. A model that is
    converted already stays as it is.

    Args:
        config: how inputs are kept; the defaults of ``PammConfig`` if left out.
        include: which layers, as in ``pamm.convert``.
        exclude: which not.

    Raises:
        PammError: when the Trainer is made, for the reasons of ``pamm.convert``.

    Example:
        >>> callback = PammCallback(PammConfig(ratio="1/512"))
        >>> trainer = Trainer(model, arguments, callbacks=[callback])  # doctest: +SKIP
        >>> print(callback.report)  # doctest: +SKIP
    """

    report: Report | None = None
    """What was converted; ``None`` before the Trainer is made."""

    def __init__(
        self,
        config: PammConfig | None = None,
        *,
        include: Selector = None,
        exclude: Selector = None,
    ) -> None:
        self.config = config or PammConfig()
        self._select: dict[str, Any] = {"include": include, "exclude": exclude}

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Convert the model."""
        self._convert(kwargs["model"], state)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Convert the model that ``model_init`` made anew."""
        self._convert(kwargs["model"], state)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Go to the first draw of this optimizer step; its forward passes follow one another."""
        seek(kwargs["model"], state.global_step)

    def _convert(self, model: nn.Module, state: TrainerState) -> None:
        if groups(model) or recomputed_groups(model):
            return
        self.report = convert(model, self.config, **self._select)
        if state.is_world_process_zero:
            _log.info("%s", self.report)
