"""Lightning's Trainer with PAMM.

    python examples/lightning_module.py

Needs pamm-torch[train] and lightning. A tiny LLaMA on made-up text; put in your module and data.
"""

import tempfile

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import pamm
from pamm.integrations.lightning import PammCallback


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(pamm.param_groups(self, lr=3e-3, lr_factor=0.5))


def main(folder: str) -> None:
    ids = (torch.arange(32) + torch.arange(128)[:, None]) % 64
    callback = PammCallback(pamm.PammConfig("pamm", 1 / 32))
    trainer = lightning.Trainer(
        max_steps=10, default_root_dir=folder, callbacks=[callback], logger=False, devices=1
    )
    trainer.fit(LanguageModel(), DataLoader(list(ids), batch_size=8))
    print(callback.report)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
