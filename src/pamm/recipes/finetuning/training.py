"""One fine-tuning on the Transformers Trainer: what all recipes share."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

import pamm
from pamm.analysis.memory import saved_bytes
from pamm.integrations.transformers import PammTrainerMixin
from pamm.recipes.callbacks import StopCallback
from pamm.recipes.checkpoints import last_checkpoint
from pamm.recipes.commit import commit, versions
from pamm.recipes.files import METRICS, RESULT, finite, write_json, write_text
from pamm.recipes.finetuning.plan import FinetuneRun
from pamm.recipes.finetuning.settings import FinetuneConfig
from pamm.recipes.ranks import ignore_launcher, processes
from pamm.recompute import group_layers


class PammTrainer(PammTrainerMixin, Trainer):
    """A Trainer that converts its model."""


class StopWithinEpoch(StopCallback):
    """Ends an epoch that was cut short without what follows a whole one.

    An evaluation there would move the random state that the checkpoint has saved.
    """

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take back what the Trainer asked for."""
        is_cut = state.global_step < state.max_steps and (state.epoch or 0) % 1 != 0
        if control.should_training_stop and is_cut:
            control.should_evaluate = control.should_save = False


def begin(run: FinetuneRun) -> Path | None:
    """Make the run's folder and be quiet; returns the checkpoint to go on from, if there is one."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    run.folder.mkdir(parents=True, exist_ok=True)
    checkpoint, _ = last_checkpoint(run.folder)
    commit()  # of now, not of when the run is trained
    ignore_launcher()
    transformers.set_seed(run.seed)
    return checkpoint


def uses_bf16(config: FinetuneConfig) -> bool:
    """Whether the run computes in bf16."""
    return config.precision == "bf16" or (config.precision == "auto" and torch.cuda.is_available())


def arguments(config: FinetuneConfig, run: FinetuneRun, **more: Any) -> TrainingArguments:
    """The Trainer's; ``more`` adds to them, or differs."""
    cuda = torch.cuda.is_available()
    common = {
        "output_dir": str(run.folder),
        "num_train_epochs": config.epochs,
        "per_device_train_batch_size": config.batch_of(run.task),
        "per_device_eval_batch_size": 64,
        "learning_rate": run.lr,
        "lr_scheduler_type": "linear",
        "weight_decay": config.weight_decay,
        "bf16": uses_bf16(config),
        "use_cpu": not cuda,
        "dataloader_pin_memory": cuda,
        "seed": run.seed,
        "logging_steps": 20,
        "logging_nan_inf_filter": False,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        # Processes do not write at the same time: one must be there that all have written.
        "save_total_limit": 1 if processes() == 1 else 2,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**common, **more})


def quiet(trainer: Trainer) -> Trainer:
    """The same, which prints nothing."""
    trainer.remove_callback(PrinterCallback)
    return trainer


def fit(trainer: Trainer, checkpoint: Path | None) -> bool:
    """Train to the end, and write the metrics; False if it was stopped before."""
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.state.global_step < trainer.state.max_steps:
        return False
    if not trainer.is_world_process_zero():
        return True
    history = trainer.state.log_history  # from the first step on: checkpoints carry it
    lines = [json.dumps({k: _plain(v) for k, v in line.items()}) + "\n" for line in history]
    write_text(Path(str(trainer.args.output_dir)) / METRICS, "".join(lines))
    return True


def write_result(
    config: FinetuneConfig, run: FinetuneRun, trainer: Trainer, more: Mapping[str, Any]
) -> None:
    """Write the run's result: its scores, its rates, what it ran on, and ``more``.

    In the first process, if there are several.
    """
    if not trainer.is_world_process_zero():
        return
    scores = [line["eval_score"] for line in trainer.state.log_history if "eval_score" in line]
    device = trainer.args.device
    result = {
        "task": run.task,
        "arm": run.arm.name,
        "score": finite(scores[-1]),
        "best_score": max((s for s in scores if math.isfinite(s)), default=None),
        "lr": run.lr,
        "lr_factor": run.lr_factor,
        "seed": run.seed,
        **more,
        "steps": trainer.state.global_step,
        "epochs": config.epochs,
        "processes": processes(),
        "precision": "bf16 autocast" if trainer.args.bf16 else "fp32",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
    }
    write_json(run.folder / RESULT, result)


def held_bytes(
    model: nn.Module,
    config: pamm.PammConfig,
    inputs: Mapping[str, torch.Tensor],
    bf16: bool,
    **select: Any,
) -> dict[str, int | None]:
    """Bytes that q/k/v inputs hold in one forward pass, measured with saved-tensor hooks.

    Args:
        model: converted or not; not converted afterwards.
        config: how the inputs are kept.
        inputs: of the forward pass.
        bf16: whether it runs under autocast.
        select: which groups, and an example, as in ``pamm.convert``.

    Returns:
        ``held_bytes``; ``predicted_bytes`` of the formula and ``paper_bytes`` as the paper counts;
        ``held_tokens`` that the groups saw and their ``generators``.
    """
    pamm.revert(model)
    report = pamm.convert(model, config, **select)
    layers = group_layers(model)
    if config.method == "exact":
        pamm.revert(model)
    model.train()
    device = next(model.parameters()).device
    first = model.get_submodule(next(iter(layers.values()))[0])
    rows: list[int] = []
    counter = first.register_forward_pre_hook(lambda _, args: rows.append(args[0][..., 0].numel()))
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            held = saved_bytes(model, layers, lambda: model(**inputs))
    finally:
        counter.remove()
        pamm.revert(model)
    if bf16:  # layers compute in it, whatever their weights are kept in
        report = report.computing_in(torch.bfloat16)
    tokens = rows[0]
    return {
        "held_bytes": sum(held.values()),
        "predicted_bytes": report.held_bytes(tokens),
        "paper_bytes": report.paper_bytes(tokens),
        "held_tokens": tokens,
        "generators": config.generators(tokens) if config.method == "pamm" else None,
    }


def _plain(value: Any) -> Any:
    return finite(value) if isinstance(value, float) else value
