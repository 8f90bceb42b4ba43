"""Transformers: a callback that converts the model of a ``Trainer``, and a mixin that reports.

Both work with the trainers of TRL, which are Trainers.
"""

import json
import logging
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pamm.bypass import checkpointing, refuse_bypasses
from pamm.compressors import Exact
from pamm.config import PammConfig, checked, whole_number
from pamm.errors import PammError
from pamm.example import Example
from pamm.fidelity import watch
from pamm.naming import Selector, patterns
from pamm.nn import groups
from pamm.optim import check_positive, reduced_weights
from pamm.recompute import group_layers, recomputed_groups
from pamm.report import Report
from pamm.resume import carried, restore_carried, seek
from pamm.surgery import convert, is_converted

_log = logging.getLogger(__name__)


def _carried_file(args: TrainingArguments) -> str:
    """What each rank's groups carry from step to step; written beside the checkpoints. Not called
    ``*.safetensors``: who loads a folder may take every such file for weights.
    """
    return f"pamm_carried-{args.process_index}.tensors"


RUN = "pamm_run"
"""In the Trainer's state, and so in ``trainer_state.json``: the run that wrote a checkpoint."""

SIDE_FILE = "pamm_config.json"
"""Written beside the weights. For people: nothing reads it, and the weights need nothing."""


class PammCallback(TrainerCallback):
    """Converts the Trainer's model when the Trainer is made, and positions the draws at each step.

    So a run resumed from a checkpoint draws the generators that the uninterrupted run would have
    drawn. Checkpoints are those of the exact model, and a file ``pamm_config.json`` beside them
    says how they were made. A model that is converted already stays as it is: for several settings
    convert it before the Trainer is made. ``include``, ``exclude``, ``targets``, ``widen`` and
    ``example`` are those of ``pamm.convert``.

    Args:
        config: how inputs are kept; the defaults of ``PammConfig`` if left out.

    Raises:
        PammError: when the Trainer is made, for the reasons of ``pamm.convert``.

    Examples:
        >>> callback = PammCallback(PammConfig("pamm", "1/512"))
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
        self._converted: dict[str, int] = {}

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
        """Convert the model that ``model_init`` made anew; look at what training did to it."""
        model = kwargs["model"]
        refuse_bypasses(model)
        self._convert(model, state)
        self._check(model)
        self._resume(model, args, state)
        notice = checkpointing(model)
        if notice and state.is_world_process_zero:
            _log.warning("%s", notice)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Go to the first draw of this optimizer step; its forward passes follow one another."""
        seek(kwargs["model"], state.global_step)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Write the side file, and what each rank's groups carry, beside a checkpoint."""
        folder = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self.write_side_file(folder)
        tensors = carried(kwargs["model"])
        if tensors and folder.is_dir():
            save_file(tensors, folder / _carried_file(args))

    def write_side_file(self, folder: Path) -> None:
        """Write ``pamm_config.json``: the settings, and the groups by name."""
        text = json.dumps({**self.settings(), "groups": [*self._converted]}, indent=2)
        (folder / SIDE_FILE).write_text(text + "\n", encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        """How inputs are kept; empty for a model that was converted before, by other settings."""
        return {} if self.report is None else self.config.to_dict()

    def _resume(self, model: nn.Module, args: TrainingArguments, state: TrainerState) -> None:
        """Give the groups back what they carried when the checkpoint was written.

        Callbacks are not told which checkpoint that is. It may lie in this run's folder, in that of
        the run that wrote it, or where the arguments say; it is the one of the state's run.
        """
        if not carried(model):
            return
        known: Any = state.stateful_callbacks
        run, here = known.get(RUN), str(Path(args.output_dir or "").resolve())
        known[RUN] = {"id": uuid.uuid4().hex, "folder": here}  # of the checkpoints from now on
        if not state.global_step:
            return
        at = f"checkpoint-{state.global_step}"
        folders = [Path(here, at), Path(run["folder"], at)] if run else []
        folders += [Path(args.resume_from_checkpoint)] if args.resume_from_checkpoint else []
        right = (folder / _carried_file(args) for folder in folders if run and _run(folder) == run)
        path = next((path for path in right if path.exists()), None)
        if path is not None:
            restore_carried(model, load_file(path))
        else:
            _log.warning(
                "what PAMM's groups carried at step %s was not found: directions are found anew in "
                "the first steps. If the checkpoint was moved, name it in "
                "TrainingArguments(resume_from_checkpoint=...) too.",
                state.global_step,
            )

    def _convert(self, model: nn.Module, state: TrainerState) -> None:
        is_new = not is_converted(model)
        if is_new:
            self.report = convert(model, self.config, **self._select)
        elif not self._converted and state.is_world_process_zero:
            _log.warning(
                "the model was converted before this PammCallback came to it, and stays as it is: "
                "%s is not applied. For other layers call pamm.convert yourself.",
                self.config,
            )
        if is_new or not self._converted:
            self._converted = _groups(model)
        tag = getattr(model, "add_model_tags", None)
        if tag is not None:
            tag(["pamm"])
        if is_new and state.is_world_process_zero:
            _log.info("%s", self.report)

    def _check(self, model: nn.Module) -> None:
        """What prepares a model for fp8 puts layers of its own in place of converted ones."""
        there = _groups(model)
        lost = sorted(name for name, n in self._converted.items() if there.get(name) != n)
        if lost:
            raise PammError(
                f"{len(lost)} of {len(self._converted)} converted groups are gone, {lost[0]} for "
                "one: something has put other layers in their place since, as training in fp8 "
                "does. Train in bf16."
            )


def _run(checkpoint: Path) -> Any:
    """The run that wrote a checkpoint, as its state says; None if it does not."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        return state["stateful_callbacks"].get(RUN)
    except (OSError, ValueError, KeyError):
        return None


def _groups(model: nn.Module) -> dict[str, int]:
    """The groups by name, with how many converted layers each has."""
    return {name: len(layers) for name, layers in group_layers(model).items()}


def _split_param_groups(optimizer: Optimizer, model: nn.Module, lr_factor: float) -> None:
    """Give weights trained by PAMM groups of their own, at ``lr_factor`` times the rate.

    The first groups stay the first: the Trainer logs the rate of the first one.
    """
    ours = reduced_weights(model, "pamm_lr_factor", lr_factor)
    for group in list(optimizer.param_groups):
        taken = [parameter for parameter in group["params"] if id(parameter) in ours]
        if taken:
            group["params"] = [each for each in group["params"] if id(each) not in ours]
            settings = {**group, "params": taken, "lr": group["lr"] * lr_factor}
            optimizer.add_param_group(settings)


class PammTrainerMixin:
    """Mixed into a Trainer's class, for what a callback cannot do.

    The learning rate of q, k and v; numbers in the Trainer's own log, and so in TensorBoard, W&B
    and Trackio; the side file and a section of the model card on ``save_model``. All other
    arguments are the Trainer's.

    Args:
        pamm: a callback; made of a ``PammConfig`` if that is given.
        pamm_lr_factor: the learning rate of weights trained by PAMM, as a factor of the others'
            (see ``pamm.param_groups``); 1 for ``"recompute"``, whose gradients are exact.
        pamm_log_steps: measure every so many steps, and log with the next loss:
            ``pamm_held_bytes``, ``pamm_dropped_share``, ``pamm_cosine/LAYER``,
            ``pamm_relative_error/LAYER`` and ``pamm_lost/LAYER`` (``pamm.fidelity``). 0 is never.
        pamm_log_layers: patterns of names to compare with the exact gradient, of layers or of
            groups; the middle group and its layers if left out.

    Raises:
        PammError: if a number is out of range, or numbers are asked of a compiled model; when
            training begins, if a factor or numbers are asked of a model whose gradients are exact.

    Examples:
        >>> class PammTrainer(PammTrainerMixin, Trainer): ...  # doctest: +SKIP
        >>> trainer = PammTrainer(  # doctest: +SKIP
        ...     model, arguments, pamm=PammConfig(), pamm_lr_factor=1.0, pamm_log_steps=100
        ... )
    """

    def __init__(
        self,
        *args: Any,
        pamm: PammCallback | PammConfig,
        pamm_lr_factor: float,
        pamm_log_steps: int = 0,
        pamm_log_layers: Iterable[str] | None = None,
        **kwargs: Any,
    ) -> None:
        check_positive("pamm_lr_factor", pamm_lr_factor)
        whole_number("pamm_log_steps", pamm_log_steps, least=0)
        if pamm_log_layers is not None:
            pamm_log_layers = patterns("pamm_log_layers", pamm_log_layers)
        self.pamm = pamm if isinstance(pamm, PammCallback) else PammCallback(pamm)
        self._pamm_lr_factor = pamm_lr_factor
        self._pamm_log_steps, self._pamm_log_layers = pamm_log_steps, pamm_log_layers
        self._pamm_metrics: dict[str, float] = {}
        self._pamm_watched_step = -1
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), self.pamm]
        super().__init__(*args, **kwargs)
        if pamm_log_steps and self.args.torch_compile:  # type: ignore[attr-defined]
            raise PammError("pamm_log_steps needs a model that is not compiled; set it to 0.")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's optimizer, with groups of their own for weights trained by PAMM."""
        made = self.optimizer is None  # type: ignore[has-type]
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if made and self._pamm_lr_factor != 1:
            model = args[0] if args else kwargs.get("model")
            _split_param_groups(optimizer, model or self.model, self._pamm_lr_factor)  # type: ignore[attr-defined]
        return optimizer

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """The Trainer's; watched at the steps to measure, in their first forward pass."""
        step = self.state.global_step  # type: ignore[attr-defined]
        every = self._pamm_log_steps
        if not every or step % every or step == self._pamm_watched_step:
            return super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        self._pamm_watched_step = step
        with watch(model, self._pamm_log_layers) as watched:
            loss = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        self._pamm_metrics = {f"pamm_{name}": n for name, n in watched.metrics().items()}
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's, with the latest measurement beside the loss."""
        if "loss" in logs:
            logs |= self._pamm_metrics
            self._pamm_metrics = {}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """The Trainer's, and the side file."""
        super().save_model(output_dir, *args, **kwargs)  # type: ignore[misc]
        folder = Path(output_dir or self.args.output_dir)  # type: ignore[attr-defined]
        if self.args.should_save and folder.is_dir():  # type: ignore[attr-defined]
            self.pamm.write_side_file(folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's, with a section on how the model was trained."""
        tags = kwargs.get("tags") or []
        kwargs["tags"] = [*([tags] if isinstance(tags, str) else tags), "pamm"]
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        card = Path(self.args.output_dir) / "README.md"  # type: ignore[attr-defined]
        if self.is_world_process_zero() and card.is_file():  # type: ignore[attr-defined]
            text = card.read_text(encoding="utf-8")
            if "## PAMM" not in text:
                card.write_text(f"{text.rstrip()}\n\n{self._section()}", encoding="utf-8")

    def _section(self) -> str:
        model: Any = self.model  # type: ignore[attr-defined]
        kept = sum(not isinstance(group.method, Exact) for group in groups(model))
        again = len(recomputed_groups(model))
        text = "## PAMM\n\nTrained with `pamm-torch`. "
        if kept:
            text += f"The weight gradients of {kept} groups of linear layers were approximate. "
        if again:
            text += f"The inputs of {again} groups were computed again in backward, exactly. "
        text += "Forward passes are exact, and using the model needs nothing of it.\n\n"
        settings = self.pamm.settings() | {"lr_factor": self._pamm_lr_factor}
        return text + "".join(f"- {name}: {value}\n" for name, value in settings.items())
