"""One fine-tuning of a vision-language model; goes on from its last checkpoint."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, Trainer

from pamm.config import PammConfig
from pamm.integrations.transformers import PammCallback, PammTrainerMixin
from pamm.padding import skip_padding
from pamm.recipes.files import read_json, write_json
from pamm.recipes.finetuning.metrics import class_f1, confusion
from pamm.recipes.finetuning.plan import FinetuneRun
from pamm.recipes.finetuning.training import (
    StopWithinEpoch,
    arguments,
    begin,
    fit,
    held_bytes,
    quiet,
    uses_bf16,
    write_result,
)
from pamm.recipes.finetuning.vlm.image_folder import read_images
from pamm.recipes.finetuning.vlm.model import convert_towers, load, select, vision_tower
from pamm.recipes.finetuning.vlm.questions import ImageRows, Questions
from pamm.recipes.finetuning.vlm.settings import VlmArm, VlmConfig
from pamm.recipes.stop import Stop

BEFORE = "before.json"
SCORES = ("score", "weighted_f1", "confusion")


class AnswerTrainer(Trainer):
    """A Trainer that evaluates by the answers a model gives, which are always names of classes."""

    def __init__(self, *args: Any, questions: Questions, **kwargs: Any) -> None:
        super().__init__(*args, data_collator=questions, **kwargs)
        self._questions = questions
        self._generation = GenerationConfig(
            do_sample=False,
            use_cache=True,
            max_new_tokens=max(map(len, questions.answers)),
            pad_token_id=questions.pad,
            eos_token_id=questions.end,
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[None, Tensor, Tensor]:
        """The number of the class that each answer names, and the right one."""
        inputs = self._prepare_inputs(inputs)  # type: ignore[assignment]
        labels = inputs.pop("labels")
        length = inputs["input_ids"].shape[1]
        asked: Any = self.accelerator.unwrap_model(model)
        with torch.no_grad(), self.compute_loss_context_manager():
            ids = asked.generate(
                **inputs,
                generation_config=self._generation,
                prefix_allowed_tokens_fn=lambda _, ids: self._questions.next_tokens(
                    ids[length:].tolist()
                ),
            )
        answers = [self._questions.class_of(row) for row in ids[:, length:].tolist()]
        return None, torch.tensor(answers, device=labels.device), labels


class PammAnswerTrainer(PammTrainerMixin, AnswerTrainer):
    """The same for a converted model."""


def train_run(config: VlmConfig, data: str, run: FinetuneRun, stop: Stop) -> bool:
    """Train one run, from its last checkpoint if there is one.

    Args:
        config: of all runs.
        data: folder of the images.
        run: one of them.
        stop: ends training after a step, with a checkpoint.

    Returns:
        Whether it is finished and its result written; False if ``stop`` was asked before.
    """
    checkpoint = begin(run)
    train, validation = read_images(data, config.validation_share)
    processor, model = load(config, train.classes, uses_bf16(config), checkpoint)
    size = config.image_size
    if config.from_scratch is not None and size is None:
        size = config.from_scratch["vision_config"]["image_size"]
    questions = Questions(processor, train.classes, size)
    rows, held_out = ImageRows(train, answered=True), ImageRows(validation, answered=False)
    batch = questions([rows[i] for i in range(min(config.batch_size, len(rows)))])
    trainer = quiet(_trainer(config, run, model, questions, rows, held_out, batch, stop))
    if checkpoint is None and run.arm.is_exact and config.from_scratch is None:
        found = trainer.evaluate()
        if trainer.is_world_process_zero():
            write_json(run.folder / BEFORE, {name: found[f"eval_{name}"] for name in SCORES})
    if not fit(trainer, checkpoint):
        return False
    last = next(e for e in reversed(trainer.state.log_history) if "eval_score" in e)
    before = run.folder / BEFORE
    more = {
        "weighted_f1": last["eval_weighted_f1"],
        "confusion": last["eval_confusion"],
        "classes": list(train.classes),
        "before": read_json(before) if before.exists() else None,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        **_memory(run, model, batch, trainer),
    }
    write_result(config, run, trainer, more)
    return True


def _trainer(
    config: VlmConfig,
    run: FinetuneRun,
    model: nn.Module,
    questions: Questions,
    train: ImageRows,
    validation: ImageRows,
    batch: dict[str, Tensor],
    stop: Stop,
) -> Trainer:
    cuda = torch.cuda.is_available()
    common: dict[str, Any] = {
        "model": model,
        "args": arguments(
            config,
            run,
            gradient_accumulation_steps=config.accumulation,
            warmup_steps=0.1,
            remove_unused_columns=False,
            dataloader_num_workers=2 if cuda else 0,
            dataloader_persistent_workers=cuda,
        ),
        "questions": questions,
        "train_dataset": train,
        "eval_dataset": validation,
        "compute_metrics": _Scores(len(questions.answers)),
        "callbacks": [StopWithinEpoch(stop)],
    }
    if not run.converts:
        return AnswerTrainer(**common)
    seeded = {k: dataclasses.replace(v, seed=run.seed) for k, v in _towers(run).items()}
    callback = PammCallback(seeded["language"])
    callback.report = convert_towers(model, seeded, batch)
    skip_padding(model)
    return PammAnswerTrainer(**common, pamm=callback, pamm_lr_factor=run.lr_factor)


class _Scores:
    """Macro F1 as the score, weighted F1, and how often each class was taken for which."""

    def __init__(self, classes: int) -> None:
        self._classes = classes

    def __call__(self, predictions: Any) -> dict[str, Any]:
        predicted, labels = map(torch.as_tensor, (predictions.predictions, predictions.label_ids))
        if (predicted < 0).any():  # a model whose numbers are not finite spells anything
            return {"score": math.nan, "weighted_f1": None, "confusion": None}
        each = class_f1(predicted, labels, self._classes)
        counts = torch.bincount(labels.long(), minlength=self._classes)
        return {
            "score": each[counts > 0].mean().item(),
            "weighted_f1": (each * counts).sum().item() / counts.sum().item(),
            "confusion": confusion(predicted, labels, self._classes).tolist(),
        }


def _towers(run: FinetuneRun) -> dict[str, PammConfig]:
    assert isinstance(run.arm, VlmArm)
    return run.arm.towers


def _memory(
    run: FinetuneRun, model: nn.Module, batch: dict[str, Tensor], trainer: Trainer
) -> dict[str, Any]:
    """Bytes of q/k/v inputs held in one forward pass, in each tower, beside exact training's."""
    inputs = {name: tensor.to(trainer.args.device) for name, tensor in batch.items()}
    prefix, bf16 = vision_tower(model), trainer.args.bf16
    towers = {}
    for name, config in _towers(run).items():
        chosen = {**select(name, prefix), "example": batch}
        exact = held_bytes(model, PammConfig("exact"), inputs, bf16, **chosen)
        ours = held_bytes(model, config, inputs, bf16, **chosen)
        towers[name] = {**ours, "exact_bytes": exact["held_bytes"]}
    total = {key: sum(t[key] for t in towers.values()) for key in ("held_bytes", "exact_bytes")}
    return {"towers": towers, **total}
