"""TRL's SFTTrainer: the callback and the mixin as for any Trainer."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import pamm
from pamm.integrations.transformers import PammCallback, PammTrainerMixin
from pamm.nn import groups
from tests.helpers import pamm_layers
from tests.integrations.test_transformers import llama

pytest.importorskip("trl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of TRL's own imports
    from trl import SFTConfig, SFTTrainer

CONFIG = pamm.PammConfig("pamm", 1 / 8)
WORDS = ("the a model learns to write short texts about rows columns and their products").split()  # noqa: SIM905


class PammSFTTrainer(PammTrainerMixin, SFTTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", *WORDS]
    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, "<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()  # type: ignore[misc]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
    )


def texts() -> Dataset:
    return Dataset.from_dict(
        {"text": [" ".join(WORDS[i % 7 : i % 7 + 3 + i % 4]) for i in range(32)]}
    )


def trainer(folder: Path, kind: Any = SFTTrainer, model: Any = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_length": 16,
        "activation_checkpointing": False,
    }
    return kind(
        model=model or llama(),
        args=SFTConfig(**(arguments | changes.pop("arguments", {}))),
        train_dataset=texts(),
        processing_class=tokenizer(),
        **changes,
    )


@pytest.mark.parametrize("checkpointing", [True, False])  # True is TRL's default
def test_train_checkpoint_resume_and_reload(tmp_path: Path, checkpointing: bool) -> None:
    arguments = {"activation_checkpointing": checkpointing}
    straight, resumed = llama(), llama()
    first, second = (
        trainer(tmp_path, model=each, callbacks=[PammCallback(CONFIG)], arguments=arguments)
        for each in (straight, resumed)
    )
    first.train()
    assert len(pamm_layers(straight)) == 6
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert not pamm_layers(loaded)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, straight.get_parameter(name)), name
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_the_mixin_logs_and_sets_rates(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        PammSFTTrainer,
        pamm=CONFIG,
        pamm_lr_factor=0.5,
        pamm_log_steps=2,
        arguments={"learning_rate": 1e-3},
    )
    made.train()
    logs = [log for log in made.state.log_history if "pamm_held_bytes" in log]
    assert [log["step"] for log in logs] == [1, 3]
    assert len({group["initial_lr"] for group in made.optimizer.param_groups}) == 2
    assert len(groups(made.model)) == 2


def test_packed_sequences(tmp_path: Path) -> None:
    model = llama()
    settings = {"packing": True, "packing_strategy": "wrapped", "max_steps": 2}
    trainer(tmp_path, model=model, callbacks=[PammCallback(CONFIG)], arguments=settings).train()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
