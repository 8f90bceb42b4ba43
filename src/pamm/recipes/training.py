"""Train one arm on the Transformers Trainer, go on from its last checkpoint, write its result."""

import dataclasses
import platform
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch.utils.data import Dataset
from torch.utils.tensorboard import SummaryWriter
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

import pamm
from pamm.analysis.memory import group_layers, peak_bytes, saved_bytes
from pamm.integrations.transformers import PammCallback
from pamm.recipes.callbacks import (
    MetricsCallback,
    ProgressCallback,
    StopCallback,
    finite,
    perplexity,
)
from pamm.recipes.files import read_json, read_json_lines, write_json
from pamm.recipes.model import build
from pamm.recipes.results import METRICS, RESULT, ArmResult
from pamm.recipes.settings import Arm, PretrainConfig
from pamm.recipes.stop import Stop
from pamm.recipes.tokens import Blocks, Tokens
from pamm.report import Report

_UNTIMED_STEPS = 5  # the first ones allocate and warm up


class ArmTrainer(Trainer):
    """A Trainer whose AdamW has ``pamm.param_groups``, made after the callback has converted."""

    def __init__(self, config: PretrainConfig, arm: Arm, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rates = {"lr": config.lr_of(arm), "lr_factor": config.lr_factor_of(arm)}
        self._weight_decay = config.weight_decay

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW; the schedule scales the rates of all groups alike."""
        if self.optimizer is None:
            chosen: Any = self.model if model is None else model
            groups = pamm.param_groups(chosen, **self._rates, weight_decay=self._weight_decay)
            self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer


def train_arm(
    config: PretrainConfig, arm: Arm, run_folder: Path, console: Console, stop: Stop
) -> bool:
    """Train one arm, from its last checkpoint if there is one.

    Returns:
        Whether it is finished and its result written; False if ``stop`` was asked before.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # of every checkpoint; there is a bar of ours
    folder = run_folder / arm.folder
    folder.mkdir(exist_ok=True)
    checkpoint, step = last_checkpoint(folder)
    tokens = Tokens.open(run_folder)
    train = Blocks(tokens.train, config.sequence_length)
    trainer = ArmTrainer(
        config,
        arm,
        build(config, tokens),
        _arguments(config, arm, folder),
        train_dataset=train,
        eval_dataset=Blocks(tokens.validation, config.sequence_length, config.eval_sequences),
        callbacks=[
            *([] if arm.is_exact else [PammCallback(arm.config)]),
            MetricsCallback(folder / METRICS, config.tokens_per_step, step),
            TensorBoardCallback(SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)),
            ProgressCallback(console, arm.name),
            StopCallback(stop),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.state.global_step < config.steps:
        return False
    result = _result(config, arm, trainer, train, read_json_lines(folder / METRICS))
    write_json(folder / RESULT, dataclasses.asdict(result))
    return True


def last_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """The newest checkpoint that was written to its end, and its step; removes unfinished ones."""
    newest, at = None, 0
    for path in folder.glob("checkpoint-*"):
        try:  # the Trainer writes this file last
            step = read_json(path / "trainer_state.json")["global_step"]
        except (OSError, ValueError):
            shutil.rmtree(path)
            continue
        if step > at:
            newest, at = path, step
    return newest, at


def _arguments(config: PretrainConfig, arm: Arm, folder: Path) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        learning_rate=config.lr_of(arm),
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=max(1, config.steps // 10),
        bf16=cuda,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        seed=config.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,  # a loss that is not finite is shown, not smoothed away
        eval_strategy="steps",
        eval_steps=config.eval_every,
        prediction_loss_only=True,
        save_steps=config.save_every,
        save_total_limit=1,
        report_to="none",  # TensorBoard is a callback of its own, with a folder of its own
        disable_tqdm=True,
    )


def _result(
    config: PretrainConfig,
    arm: Arm,
    trainer: Trainer,
    train: Dataset[dict[str, torch.Tensor]],
    metrics: list[dict[str, Any]],
) -> ArmResult:
    device = trainer.args.device
    model: Any = trainer.model
    peak = peak_bytes(device)  # before the measurement below adds to it
    held, report = _held_bytes(config, arm, trainer, train)
    loss = next(line["eval_loss"] for line in reversed(metrics) if "eval_loss" in line)
    return ArmResult(
        name=arm.name,
        folder=arm.folder,
        method=arm.config.method,
        validation_loss=loss,
        perplexity=None if loss is None else finite(perplexity(loss)),
        tokens_per_second=config.tokens_per_step / _median_step_seconds(metrics),
        held_bytes=held,
        predicted_bytes=report.held_bytes(config.sequence_length * config.batch_size),
        paper_bytes=(
            report.paper_bytes(config.sequence_length * config.batch_size)
            if arm.config.method == "pamm"
            else None
        ),
        peak_bytes=peak,
        steps=config.steps,
        tokens=config.steps * config.tokens_per_step,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        groups=len(report.converted),
        lr=config.lr_of(arm),
        lr_factor=config.lr_factor_of(arm),
        precision="bf16 autocast" if trainer.args.bf16 else "fp32",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        device_type=device.type,
        versions={
            "pamm": pamm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    )


def _held_bytes(
    config: PretrainConfig,
    arm: Arm,
    trainer: Trainer,
    train: Dataset[dict[str, torch.Tensor]],
) -> tuple[int, Report]:
    """Bytes that all groups keep in one training forward pass, and what was converted."""
    model: Any = trainer.model
    pamm.revert(model)
    report = pamm.convert(model, arm.config)
    layers = group_layers(model)
    if arm.is_exact:
        pamm.revert(model)
    batch = trainer.data_collator([train[index] for index in range(config.batch_size)])
    inputs = trainer._prepare_inputs(batch)
    model.train()
    held = saved_bytes(model, layers, lambda: trainer.compute_loss(model, inputs))
    if trainer.args.bf16:  # layers compute in it, whatever their weights are kept in
        report = dataclasses.replace(
            report,
            converted=tuple(
                dataclasses.replace(group, dtype=torch.bfloat16) for group in report.converted
            ),
        )
    return sum(held.values()), report


def _median_step_seconds(metrics: list[dict[str, Any]]) -> float:
    seconds = [line["seconds"] for line in metrics if "seconds" in line]
    each = [after - before for before, after in zip([0.0, *seconds], seconds, strict=False)]
    return statistics.median(each[_UNTIMED_STEPS:] or each)


def _cpu() -> str:
    """Name of the processor and how many threads torch uses."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or a processor without a name
    return f"{name}, {torch.get_num_threads()} threads"
