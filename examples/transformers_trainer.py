"""Transformers' Trainer with PAMM: rates of their own, and fidelity in the log.

    python examples/transformers_trainer.py

Needs pamm-torch[train]. A tiny LLaMA on made-up text; put in your model and data.
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import pamm
from pamm.integrations.transformers import PammTrainerMixin


class PammTrainer(PammTrainerMixin, Trainer):
    pass


class Counting(Dataset):
    """Numbers in a row, from somewhere on."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(32) + index) % 64
        return {"input_ids": ids, "labels": ids}


def main(folder: str) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    trainer = PammTrainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            folder,
            max_steps=20,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=5,
            save_steps=10,
            report_to="none",  # "tensorboard", "wandb" and "trackio" get the same numbers
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=Counting(),
        pamm=pamm.PammConfig("pamm", 1 / 32),
        pamm_lr_factor=0.5,
        pamm_log_steps=5,
    )
    print(trainer.pamm.report)
    trainer.train()
    trainer.save_model()  # the weights of an ordinary LLaMA, and pamm_config.json


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
