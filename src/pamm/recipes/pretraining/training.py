"""Train one arm on the Transformers Trainer, go on from its last checkpoint, write its result."""

import contextlib
import dataclasses
import gc
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from transformers import PrinterCallback, Trainer, TrainingArguments

import pamm
from pamm.analysis.memory import peak_bytes
from pamm.errors import PammError
from pamm.integrations.transformers import PammCallback
from pamm.recipes.callbacks import StopCallback
from pamm.recipes.checkpoints import last_checkpoint
from pamm.recipes.commit import commit, versions
from pamm.recipes.files import METRICS, RESULT, finite, read_json_lines, write_json
from pamm.recipes.pretraining.callbacks import (
    MetricsCallback,
    NoLastCheckpoint,
    ProgressCallback,
    to_board,
)
from pamm.recipes.pretraining.held import held_bytes
from pamm.recipes.pretraining.model import build, compile_blocks
from pamm.recipes.pretraining.results import ArmResult, perplexity
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import Blocks, Tokens
from pamm.recipes.ranks import ignore_launcher, processes, rank
from pamm.recipes.settings import Arm
from pamm.recipes.stop import Stop
from pamm.recipes.workers import sharing

_UNTIMED_STEPS = 5  # the first ones allocate and warm up


class ArmTrainer(Trainer):
    """A Trainer whose AdamW has ``pamm.param_groups``, made after the callback has converted.

    It does not log losses by itself, because it would wait for the device at each step.
    """

    def __init__(self, config: PretrainConfig, arm: Arm, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loss, self._loss_of = torch.zeros(()), -1
        self._rates = {"lr": config.lr_of(arm), "lr_factor": config.lr_factor_of(arm)}
        self._weight_decay, self._betas = config.weight_decay, (0.9, config.beta2)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW; the schedule scales the rates of all groups alike."""
        if self.optimizer is None:
            chosen: Any = self.model if model is None else model
            groups = pamm.param_groups(chosen, **self._rates, weight_decay=self._weight_decay)
            fused = self.args.device.type == "cuda"
            self.optimizer = torch.optim.AdamW(groups, betas=self._betas, fused=fused)
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The Trainer's; adds the losses of all forward passes of a step."""
        loss = super().training_step(*args, **kwargs)
        mean: Any = self.accelerator.reduce(loss, "mean") if processes() > 1 else loss
        step = self.state.global_step
        self._loss, self._loss_of = mean + self._loss if self._loss_of == step else mean, step
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: it takes longer than the rest of the Trainer, and nobody asks."""
        return 0

    def step_loss(self) -> Tensor:
        """Of the last step, over all processes; on the device."""
        return self._loss


def train_arm(
    config: PretrainConfig,
    arm: Arm,
    folder: Path,
    tokens: Tokens,
    console: Console,
    stop: Stop,
    keep_last: bool = True,
) -> bool:
    """Train one arm, from its last checkpoint if there is one.

    In every process of a launcher, or in one alone.

    Args:
        config: the run.
        arm: one of its arms.
        folder: of the arm, made if it is not there; all processes see the same one.
        tokens: of the run.
        console: shows the progress.
        stop: ends training after a step, with a checkpoint.
        keep_last: whether there is a checkpoint after the last step, too.

    Returns:
        Whether it is finished and its result written; False if ``stop`` was asked before.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # of every checkpoint; there is a bar of ours
    torch._dynamo.reset()  # an arm trained before in this process counts as a recompilation
    folder.mkdir(parents=True, exist_ok=True)
    commit()  # of now, not of when the arm is trained
    checkpoint, step = last_checkpoint(folder)
    ignore_launcher()
    arguments = _arguments(config, arm, folder)
    if arguments.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(arguments.device)
    model = build(config, tokens)
    if config.activation_checkpointing and not arguments.fsdp:  # FSDP2 does it itself
        name = "activation_checkpointing_enable"  # Transformers before 5.20: gradient_...
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    trainer = ArmTrainer(
        config,
        arm,
        model,
        arguments,
        train_dataset=Blocks(tokens.train, config.sequence_length),
        eval_dataset=Blocks(tokens.validation, config.sequence_length, config.eval_sequences),
        callbacks=[
            *([PammCallback(arm.config, targets=arm.targets)] if _converts(config, arm) else []),
            *([] if keep_last else [NoLastCheckpoint()]),
            StopCallback(stop),
        ],
    )
    _check_shared(trainer)
    if config.compile:
        compile_blocks(model)
    trainer.remove_callback(PrinterCallback)
    with contextlib.ExitStack() as stack:
        if rank() == 0:
            where = str(folder / "tensorboard")
            board = SummaryWriter(where, purge_step=step + 1, max_queue=1000)
            stack.callback(board.close)
            progress = ProgressCallback(console, arm.name)
            trainer.add_callback(progress)
            path, size, loss = folder / METRICS, config.tokens_per_step, trainer.step_loss
            listeners = to_board(board), progress.show
            trainer.add_callback(MetricsCallback(path, size, step, loss, listeners))
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.state.global_step < config.steps:
        return False
    if rank() == 0:
        result = _result(config, arm, trainer, tokens, read_json_lines(folder / METRICS))
        write_json(folder / RESULT, dataclasses.asdict(result))
    if processes() > 1:
        torch.distributed.barrier()  # nobody asks whether the arm is finished before
    return True


def _converts(config: PretrainConfig, arm: Arm) -> bool:
    """Exact arms stay as they are, unless q, k and v have a rate of their own."""
    return not arm.is_exact or config.lr_factor_of(arm) != 1


def _check_shared(trainer: Trainer) -> None:
    """Accelerate shares weights between accelerators only; elsewhere it would say nothing."""
    if trainer.args.fsdp and not trainer.is_fsdp_enabled:
        raise PammError(
            "fsdp shares weights between GPUs, and Accelerate found none. Leave fsdp out, or start "
            "the run on a machine with GPUs."
        )


def _arguments(config: PretrainConfig, arm: Arm, folder: Path) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation(processes()),
        learning_rate=config.lr_of(arm),
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=max(1, config.steps // 10),
        max_grad_norm=config.max_grad_norm,
        bf16=config.precision == "bf16" or (config.precision == "auto" and cuda),
        use_cpu=not cuda,
        fsdp=config.fsdp and processes() > 1,  # type: ignore[arg-type]
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "activation_checkpointing": config.activation_checkpointing,
        },
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=cuda,
        dataloader_num_workers=0,  # a batch takes a millisecond to make, a process longer to start
        accelerator_config={"non_blocking": True},  # batches move while the device works
        seed=config.seed,
        logging_strategy="no",  # MetricsCallback does
        logging_nan_inf_filter=False,  # a loss that is not finite is shown, not smoothed away
        eval_strategy="steps",
        eval_steps=config.eval_every,
        prediction_loss_only=True,
        save_steps=config.save_every,
        # Processes do not write at the same time: while the last one still does, there must be
        # a checkpoint that all have written.
        save_total_limit=1 if processes() == 1 else 2,
        report_to="none",  # TensorBoard has a folder of its own
        disable_tqdm=True,
    )


def _result(
    config: PretrainConfig,
    arm: Arm,
    trainer: Trainer,
    tokens: Tokens,
    metrics: list[dict[str, Any]],
) -> ArmResult:
    device = trainer.args.device
    model: Any = trainer.model  # numel() of a weight that is shared out counts all of it
    peak = peak_bytes(device)  # before the measurement below adds to it
    held, report = held_bytes(config, arm, tokens, device, trainer.args.bf16)
    loss = next(line["eval_loss"] for line in reversed(metrics) if "eval_loss" in line)
    return ArmResult(
        name=arm.name,
        folder=arm.folder,
        method=arm.config.method,
        validation_loss=loss,
        perplexity=None if loss is None else finite(perplexity(loss)),
        tokens_per_second=config.tokens_per_step / _median_step_seconds(metrics),
        held_bytes=held,
        predicted_bytes=report.held_bytes(config.tokens_per_pass),
        paper_bytes=report.paper_bytes(config.tokens_per_pass),
        peak_bytes=peak,
        steps=config.steps,
        tokens=config.steps * config.tokens_per_step,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        groups=len(report.converted),
        lr=config.lr_of(arm),
        lr_factor=config.lr_factor_of(arm),
        precision="bf16 autocast" if trainer.args.bf16 else "fp32",
        processes=processes(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        device_type=device.type,
        versions=versions(),
        sharing=sharing(),
    )


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
