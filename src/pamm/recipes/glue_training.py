"""One fine-tuning on the Transformers Trainer; goes on from its last checkpoint."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

import pamm
from pamm.analysis.memory import group_layers, saved_bytes
from pamm.errors import PammError
from pamm.integrations.transformers import PammCallback, PammTrainerMixin
from pamm.padding import skip_padding
from pamm.recipes.callbacks import StopCallback
from pamm.recipes.files import write_json, write_text
from pamm.recipes.finetune_metrics import METRICS as SCORES
from pamm.recipes.finetune_settings import GlueConfig
from pamm.recipes.glue_plan import GlueRun
from pamm.recipes.glue_tasks import TASKS, Rows, Task, read_task
from pamm.recipes.results import METRICS, RESULT, finite
from pamm.recipes.stop import Stop
from pamm.recipes.training import last_checkpoint


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


class Encoded(Dataset):
    """Rows as token ids, each of its own length."""

    def __init__(self, rows: Rows, tokenizer: Any, max_length: int, task: Task) -> None:
        columns = [list(column) for column in zip(*rows.texts, strict=True)]
        self.ids = tokenizer(*columns, truncation=True, max_length=max_length)
        kind = float if task.classes == 1 else int
        self.labels = [kind(label) for label in rows.labels]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: self.ids[key][index] for key in self.ids} | {"labels": self.labels[index]}

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(ids) for ids in self.ids["input_ids"]]


class Pad:
    """Makes a batch of rows, as long as the longest."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Ids, mask and labels."""
        features = [{key: row[key] for key in row if key != "labels"} for row in rows]
        batch = self._tokenizer.pad(features, return_tensors="pt")
        return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}


def load(name: str, task: Task) -> tuple[Any, Any]:
    """Tokenizer and model with a new head; its weights follow torch's seed.

    Raises:
        PammError: if there is no such model, or it has no head for sequences.
    """
    kind = "regression" if task.classes == 1 else "single_label_classification"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=task.classes, problem_type=kind, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PammError(
            f"cannot load {name} with a head for sequences: {reason}. Give an encoder's name on "
            "the hub, or its folder with a tokenizer."
        ) from error
    return tokenizer, model


def train_run(config: GlueConfig, run: GlueRun, stop: Stop) -> bool:
    """Train one run, from its last checkpoint if there is one.

    Returns:
        Whether it is finished and its result written; False if ``stop`` was asked before.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    task, folder = TASKS[run.task], run.folder
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, _ = last_checkpoint(folder)
    set_seed(run.seed)
    tokenizer, model = load(config.model, task)
    places = getattr(model.config, "max_position_embeddings", config.max_length)
    length = min(config.max_length, places, tokenizer.model_max_length)
    train, validation = (
        Encoded(rows, tokenizer, length, task) for rows in read_task(run.task, config.data)
    )
    trainer = _trainer(config, run, model, Pad(tokenizer), train, validation, stop)
    if config.skip_padding and _converts(run):
        skip_padding(model)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.state.global_step < trainer.state.max_steps:
        return False
    history = trainer.state.log_history  # from the first step on: checkpoints carry it
    lines = [json.dumps({k: _plain(v) for k, v in line.items()}) + "\n" for line in history]
    write_text(folder / METRICS, "".join(lines))
    write_json(folder / RESULT, _result(config, run, trainer, train, Pad(tokenizer)))
    return True


def _converts(run: GlueRun) -> bool:
    """Exact arms stay as they are, unless q, k and v have a rate of their own."""
    return not run.arm.is_exact or run.lr_factor != 1


def _trainer(
    config: GlueConfig,
    run: GlueRun,
    model: nn.Module,
    pad: Pad,
    train: Encoded,
    validation: Encoded,
    stop: Stop,
) -> Trainer:
    task, cuda = TASKS[run.task], torch.cuda.is_available()

    def score(predictions: Any) -> dict[str, float]:
        labels, outputs = (
            torch.as_tensor(v) for v in (predictions.label_ids, predictions.predictions)
        )
        if not outputs.isfinite().all():  # argmax would make classes of NaN
            return {"score": math.nan}
        predicted = outputs.squeeze(-1) if task.classes == 1 else outputs.argmax(-1)
        return {"score": SCORES[task.metric](predicted, labels)}

    arguments = TrainingArguments(
        output_dir=str(run.folder),
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_of(run.task),
        per_device_eval_batch_size=64,
        learning_rate=run.lr,
        lr_scheduler_type="linear",
        weight_decay=config.weight_decay,
        bf16=config.precision == "bf16" or (config.precision == "auto" and cuda),
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        seed=run.seed,
        logging_steps=20,
        logging_nan_inf_filter=False,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
    )
    common: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": train,
        "eval_dataset": validation,
        "data_collator": pad,
        "compute_metrics": score,
        "callbacks": [StopWithinEpoch(stop)],
    }
    if _converts(run):
        drawn = dataclasses.replace(run.arm.config, seed=run.seed)
        callback = PammCallback(drawn)
        trainer = PammTrainer(**common, pamm=callback, pamm_lr_factor=run.lr_factor)
    else:
        trainer = Trainer(**common)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _plain(value: Any) -> Any:
    return finite(value) if isinstance(value, float) else value


def _result(
    config: GlueConfig, run: GlueRun, trainer: Trainer, train: Encoded, pad: Pad
) -> dict[str, Any]:
    history = trainer.state.log_history
    scores = [line["eval_score"] for line in history if "eval_score" in line]
    device, size = trainer.args.device, config.batch_of(run.task)
    held = held_bytes(run, trainer.model, train, pad, size, trainer.args.bf16)  # type: ignore[arg-type]
    return {
        "task": run.task,
        "arm": run.arm.name,
        "score": finite(scores[-1]),
        "best_score": max((s for s in scores if math.isfinite(s)), default=None),
        "lr": run.lr,
        "lr_factor": run.lr_factor,
        "seed": run.seed,
        **held,
        "padding_share": padding_share(train.lengths(), size, run.seed),
        "steps": trainer.state.global_step,
        "epochs": config.epochs,
        "precision": "bf16 autocast" if trainer.args.bf16 else "fp32",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {
            "pamm": pamm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def held_bytes(
    run: GlueRun, model: nn.Module, train: Encoded, pad: Pad, size: int, bf16: bool
) -> dict[str, int | None]:
    """Bytes of all q/k/v inputs in one forward pass of the task's longest batch.

    Measured with saved-tensor hooks, beside what the formula predicts and the paper counts.
    """
    lengths = train.lengths()
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])[:size]
    batch = pad([train[index] for index in longest])
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    tokens = inputs["input_ids"].numel()
    pamm.revert(model)
    report = pamm.convert(model, run.arm.config)
    layers = group_layers(model)
    if run.arm.is_exact:
        pamm.revert(model)
    model.train()
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        held = saved_bytes(model, layers, lambda: model(**inputs))
    if bf16:  # layers compute in it, whatever their weights are kept in
        groups = (dataclasses.replace(group, dtype=torch.bfloat16) for group in report.converted)
        report = dataclasses.replace(report, converted=tuple(groups))
    config = run.arm.config
    is_pamm = config.method == "pamm"
    return {
        "held_bytes": sum(held.values()),
        "predicted_bytes": report.held_bytes(tokens),
        "paper_bytes": report.paper_bytes(tokens) if is_pamm else None,
        "held_tokens": tokens,
        "generators": config.generators(tokens) if is_pamm else None,
    }


def padding_share(lengths: list[int], size: int, seed: int) -> float:
    """Share of padding in batches of rows in an order drawn with ``seed``: an estimate."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [[lengths[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
    return 1 - sum(lengths) / sum(max(batch) * len(batch) for batch in batches)
