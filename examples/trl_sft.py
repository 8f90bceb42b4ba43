"""TRL's SFTTrainer with PAMM.

    python examples/trl_sft.py

Needs pamm-torch[train] and trl. A tiny LLaMA and a tokenizer of a few words; put in yours.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import pamm
from pamm.integrations.transformers import PammCallback

TEXT = "a small model reads a small text and learns to write it"


def main(folder: str) -> None:
    words = ["<pad>", "<end>", *sorted(set(TEXT.split()))]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
    )
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    callback = PammCallback(pamm.PammConfig("pamm", 1 / 16))
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        args=SFTConfig(
            folder,
            max_steps=10,
            per_device_train_batch_size=8,
            logging_steps=5,
            # TRL turns it on by default. It frees X as well, so PAMM would have nothing to free.
            activation_checkpointing=False,
            bf16=torch.cuda.is_available(),
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_dict({"text": [TEXT] * 64}),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    print(callback.report)
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
