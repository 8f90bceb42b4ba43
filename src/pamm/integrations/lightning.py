"""Lightning: a callback that converts the module of a ``Trainer``."""

import logging
from collections.abc import Iterable
from typing import Any

import lightning
from lightning.pytorch.utilities.model_helpers import is_overridden

from pamm.bypass import checkpointing, refuse_bypasses
from pamm.config import PammConfig, checked
from pamm.errors import PammError
from pamm.example import Example
from pamm.naming import Selector
from pamm.report import Report
from pamm.resume import carried, restore_carried, seek
from pamm.surgery import convert, is_converted

_log = logging.getLogger(__name__)

CARRIED = "pamm_carried"
"""The key in checkpoints, beside the weights, of what groups carry from step to step."""


class PammCallback(lightning.Callback):
    """Converts the module before the strategy wraps it, and positions the draws at each step.

    So a run resumed from a checkpoint draws what the uninterrupted run would have drawn, and
    checkpoints are those of the exact model. A module that is converted already stays as it is. One
    that makes its model in ``configure_model`` calls ``pamm.convert`` there itself, before it is
    sharded: what Lightning lets a callback see comes too late.

    For a learning rate of their own use ``pamm.param_groups`` in ``configure_optimizers``; for
    several settings convert the module before ``fit``. ``include``, ``exclude``, ``targets``,
    ``widen`` and ``example`` are those of ``pamm.convert``.

    Args:
        config: how inputs are kept; the defaults of ``PammConfig`` if left out.

    Raises:
        PammError: at the beginning of ``fit``, for the reasons of ``pamm.convert``.

    Examples:
        >>> callback = PammCallback(PammConfig("pamm", "1/512"))
        >>> trainer = lightning.Trainer(callbacks=[callback])  # doctest: +SKIP
    """

    report: Report | None = None
    """What was converted; ``None`` before ``fit``."""

    def __init__(
        self,
        config: PammConfig | None = None,
        *,
        include: Selector = None,
        exclude: Selector = None,
        targets: str | Iterable[str] = "attention",
        widen: bool = False,
        example: Example | None = None,
    ) -> None:
        self.config = PammConfig() if config is None else checked(config)
        self._select: dict[str, Any] = {
            "include": include,
            "exclude": exclude,
            "targets": targets,
            "widen": widen,
            "example": example,
        }
        self._step = -1

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        """Convert the module."""
        late = is_overridden("configure_model", pl_module)
        if stage == "fit" and not late and not is_converted(pl_module):
            self.report = convert(pl_module, self.config, **self._select)
            if trainer.is_global_zero:
                _log.info("%s", self.report)

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Look at what the strategy made of it."""
        refuse_bypasses(pl_module)
        if not is_converted(pl_module):
            raise PammError(
                f"{type(pl_module).__name__} makes its model in configure_model and does not "
                "convert it; call pamm.convert there, before the model is sharded."
            )
        notice = checkpointing(pl_module)
        if notice and trainer.is_global_zero:
            _log.warning("%s", notice)
        self._step = -1

    def on_save_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        """Save what groups carry from step to step, if they do, beside the weights."""
        if tensors := carried(pl_module):
            checkpoint[CARRIED] = {name: tensor.clone() for name, tensor in tensors.items()}

    def on_load_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        """Give groups back what they carried, if the checkpoint has it."""
        if not carried(pl_module):
            return
        if CARRIED in checkpoint:
            restore_carried(pl_module, checkpoint[CARRIED])
        elif trainer.is_global_zero:
            _log.warning(
                "this checkpoint has nothing that PAMM's groups carried: directions are found anew "
                "in the first steps."
            )

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Go to the first draw of an optimizer step; its forward passes follow one another."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            seek(pl_module, self._step)
