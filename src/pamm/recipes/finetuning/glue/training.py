"""One fine-tuning on the Transformers Trainer; goes on from its last checkpoint."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer

from pamm.errors import PammError, said
from pamm.integrations.transformers import PammCallback
from pamm.padding import skip_padding
from pamm.recipes.finetuning.glue.settings import GlueConfig
from pamm.recipes.finetuning.glue.tasks import TASKS, Rows, Task, read_task
from pamm.recipes.finetuning.metrics import METRICS as SCORES
from pamm.recipes.finetuning.plan import FinetuneRun
from pamm.recipes.finetuning.training import (
    PammTrainer,
    StopWithinEpoch,
    arguments,
    begin,
    fit,
    held_bytes,
    quiet,
    write_result,
)
from pamm.recipes.stop import Stop


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


def load(name: str, task: Task, device: str | None = None) -> tuple[Any, Any]:
    """Tokenizer and model with a new head; its weights follow torch's seed.

    On the device ``meta`` the model has no weights, though their files must be there.

    Raises:
        PammError: if there is no such model, or it has no head for sequences.
    """
    kind = "regression" if task.classes == 1 else "single_label_classification"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForSequenceClassification.from_pretrained(
            name,
            num_labels=task.classes,
            problem_type=kind,
            dtype=torch.float32,
            device_map=device,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError) as error:
        raise PammError(
            f"cannot load {name} with a head for sequences: {said(error)}. Give an encoder's name "
            "on the hub, or its folder with a tokenizer."
        ) from error
    return tokenizer, model


def train_run(config: GlueConfig, run: FinetuneRun, stop: Stop) -> bool:
    """Train one run, from its last checkpoint if there is one.

    Returns:
        Whether it is finished and its result written; False if ``stop`` was asked before.
    """
    checkpoint = begin(run)
    task = TASKS[run.task]
    tokenizer, model = load(config.model, task)
    places = getattr(model.config, "max_position_embeddings", config.max_length)
    length = min(config.max_length, places, tokenizer.model_max_length)
    train, validation = (
        Encoded(rows, tokenizer, length, task) for rows in read_task(run.task, config.data)
    )
    pad = Pad(tokenizer)
    trainer = _trainer(config, run, model, pad, train, validation, stop)
    if config.skip_padding and run.converts:
        skip_padding(model)
    if not fit(quiet(trainer), checkpoint):
        return False
    size = config.batch_of(run.task)
    inputs = {k: v.to(trainer.args.device) for k, v in _longest(train, pad, size).items()}
    held = held_bytes(model, run.arm.config, inputs, trainer.args.bf16)
    padding = padding_share(train.lengths(), size, run.seed)
    write_result(config, run, trainer, {**held, "padding_share": padding})
    return True


def _trainer(
    config: GlueConfig,
    run: FinetuneRun,
    model: nn.Module,
    pad: Pad,
    train: Encoded,
    validation: Encoded,
    stop: Stop,
) -> Trainer:
    task = TASKS[run.task]

    def score(predictions: Any) -> dict[str, float]:
        labels, outputs = (
            torch.as_tensor(v) for v in (predictions.label_ids, predictions.predictions)
        )
        if not outputs.isfinite().all():  # argmax would make classes of NaN
            return {"score": math.nan}
        predicted = outputs.squeeze(-1) if task.classes == 1 else outputs.argmax(-1)
        return {"score": SCORES[task.metric](predicted, labels)}

    common: dict[str, Any] = {
        "model": model,
        "args": arguments(config, run),
        "train_dataset": train,
        "eval_dataset": validation,
        "data_collator": pad,
        "compute_metrics": score,
        "callbacks": [StopWithinEpoch(stop)],
    }
    if not run.converts:
        return Trainer(**common)
    callback = PammCallback(dataclasses.replace(run.arm.config, seed=run.seed))
    return PammTrainer(**common, pamm=callback, pamm_lr_factor=run.lr_factor)


def _longest(rows: Encoded, pad: Pad, size: int) -> dict[str, Tensor]:
    """The batch of the task's longest rows: what bytes are measured with."""
    lengths = rows.lengths()
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])[:size]
    return pad([rows[index] for index in longest])


def padding_share(lengths: list[int], size: int, seed: int) -> float:
    """Share of padding in batches of rows in an order drawn with ``seed``: an estimate."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [[lengths[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
    return 1 - sum(lengths) / sum(max(batch) * len(batch) for batch in batches)
