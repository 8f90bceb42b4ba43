import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.settings import Arm

VALUES: dict[str, Any] = {
    "name": "run-1",
    "text": "corpus",
    "model": {"hidden_size": 32},
    "arms": {
        "exact": {"method": "exact"},
        "pamm-1/128": {"method": "pamm", "ratio": "1/128", "lr_factor": 0.25},
    },
    "steps": 10,
    "lr": "2e-3",
    "seed": 3,
}


def test_values_are_read_and_completed() -> None:
    config = PretrainConfig.from_dict(VALUES)
    exact, approximate = config.arms
    assert config.text == ("corpus",)
    assert config.lr == 2e-3
    assert exact.is_exact
    assert approximate.config == PammConfig("pamm", 1 / 128, seed=3)
    assert approximate.folder == "pamm-1-128"
    assert (config.lr_of(approximate), config.lr_factor_of(approximate)) == (2e-3, 0.25)
    assert config.lr_factor_of(exact) == 1.0
    assert config.tokens_per_step == 256 * 8


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = PretrainConfig.from_dict(VALUES | {"validation": ["a", "b"], "weight_decay": 0.1})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert PretrainConfig.load(tmp_path / "config.yaml") == config


def test_a_yaml_file_as_a_person_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: run\ntext: [a.txt]\nsteps: 5\nlr: 1e-3\nmodel: {hidden_size: 8}\n"
        "arms:\n  exact: {method: exact}\n  half: {method: pamm, ratio: 1/2, lr: 4e-3}\n"
    )
    config = PretrainConfig.load(path)
    assert config.lr == 1e-3
    assert config.arms[1].config.ratio == 0.5
    assert config.lr_of(config.arms[1]) == 4e-3


def test_the_model_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps({"hidden_size": 64}))
    assert PretrainConfig.from_dict(VALUES | {"model": str(path)}).model == {"hidden_size": 64}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"step": 3}, ["no key 'step'", "did you mean 'steps'"]),
        ({"name": "a/b"}, ["name is 'a/b'", "letters, digits"]),
        ({"name": ".."}, ["name is '..'"]),
        ({"text": []}, ["text names no file"]),
        ({"text": 3}, ["text is 3", "a file or a folder"]),
        ({"steps": 0}, ["steps is 0", "1 or above"]),
        ({"steps": "many"}, ["steps is 'many'", "whole number"]),
        ({"batch_size": 1.5}, ["batch_size is 1.5", "whole number"]),
        ({"global_batch": True}, ["global_batch is True"]),
        ({"global_batch": 12}, ["global_batch is 12", "multiple of 8"]),
        ({"precision": "fp8"}, ["precision is 'fp8'", "bf16, fp32"]),
        ({"attention": "flash"}, ["attention is 'flash'", "flash_attention_2"]),
        ({"fsdp": "yes"}, ["fsdp is 'yes'", "true or false"]),
        ({"max_grad_norm": 0}, ["max_grad_norm is 0"]),
        ({"sequence_length": 1}, ["sequence_length is 1", "2 or above"]),
        ({"vocabulary": 100}, ["vocabulary is 100", "257 or above"]),
        ({"lr": 0}, ["lr is 0", "above 0"]),
        ({"lr": "fast"}, ["lr is 'fast'"]),
        ({"lr": float("nan")}, ["lr is nan"]),
        ({"lr": float("inf")}, ["lr is inf"]),
        ({"lr_factor": -1}, ["lr_factor is -1"]),
        ({"weight_decay": -0.1}, ["weight_decay is -0.1", "0 or above"]),
        ({"beta2": 1}, ["beta2 is 1.0", "below 1"]),
        ({"seed": -1}, ["seed is -1", "0 or above"]),
        ({"tokenizer": 3}, ["tokenizer is 3"]),
        ({"model": 3}, ["model is 3", "LlamaConfig"]),
        ({"model": "none.json"}, ["cannot read none.json"]),
        ({"arms": {}}, ["at least one"]),
        ({"arms": ["exact"]}, ["arms is ['exact']", "one line for each arm"]),
        ({"arms": {"a": 3}}, ["arm 'a' is 3", "{method: exact}"]),
        ({"arms": {"a": {"ration": 1}}}, ["arm 'a'", "did you mean 'ratio'"]),
        ({"arms": {"a": {"ratio": 2}}}, ["arm 'a'", "ratio is 2", "at most 1"]),
        ({"arms": {"a": {"ratio": "nan"}}}, ["arm 'a'", "ratio is 'nan'"]),
        ({"arms": {"a": {"tolerance": -1}}}, ["arm 'a'", "tolerance is -1"]),
        ({"arms": {"a": {"method": "magic"}}}, ["arm 'a'", "'magic'", "uniform_crs"]),
        ({"arms": {"a": {"lr": 0}}}, ["lr of arm 'a' is 0"]),
        ({"arms": {"a": {"targets": "down"}}}, ["arm 'a'", "'down'", "attention or mlp"]),
        ({"arms": {"a": {"targets": ["mlp"]}}}, ["arm 'a'", "['mlp']", "attention or mlp"]),
        ({"arms": {"/": {}}}, ["named '/'"]),
        ({"arms": {"a/b": {}, "a b": {}}}, ["differ as folders"]),
    ],
)
def test_what_is_refused(change: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(PammError) as caught:
        PretrainConfig.from_dict(VALUES | change)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("key", ["name", "text", "model", "arms", "steps", "lr"])
def test_a_missing_key(key: str) -> None:
    values = {name: value for name, value in VALUES.items() if name != key}
    with pytest.raises(PammError, match=f"lacks {key}"):
        PretrainConfig.from_dict(values)


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: run\n")
    with pytest.raises(PammError, match=r"run\.yaml: .*lacks text"):
        PretrainConfig.load(path)


def test_targets_are_read_and_written() -> None:
    arm = Arm.from_dict("a", {"method": "sampled", "ratio": "1/8", "targets": "mlp"}, 0)
    assert arm.targets == "mlp"
    assert Arm.from_dict("a", arm.to_dict(), 0) == arm
    assert "targets" not in Arm.from_dict("a", {"method": "sampled"}, 0).to_dict()


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Arm("exact", PammConfig(method="exact")).name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("size", ["60m", "350m", "1b", "7b"])
def test_the_papers_runs_come_with_the_package(size: str) -> None:
    config = PretrainConfig.load(f"paper-{size}")
    assert config.model == PretrainConfig.from_dict(VALUES | {"model": f"llama-{size}"}).model
    assert config.tokens_per_step == 512 * 256
    assert config.accumulation(processes=8 if size == "7b" else 1) == {
        "60m": 4, "350m": 4, "1b": 8, "7b": 1
    }[size]  # fmt: skip
    exact, *approximate = config.arms
    assert config.lr_factor_of(exact) == 1
    assert {config.lr_factor_of(arm) for arm in approximate} == {0.25}
    assert config.fsdp == (size == "7b")


@pytest.mark.parametrize(
    ("size", "millions"), [("60m", 58), ("350m", 368), ("1b", 1339), ("7b", 6738)]
)
def test_models_that_come_with_the_package_have_the_papers_size(size: str, millions: int) -> None:
    """With GaLore's vocabulary of 32,000 and untied embeddings."""
    model = PretrainConfig.from_dict(VALUES | {"model": f"llama-{size}"}).model
    with torch.device("meta"):
        made = LlamaForCausalLM(LlamaConfig(**model, vocab_size=32_000))  # type: ignore[arg-type]
    count = sum(parameter.numel() for parameter in made.parameters())
    assert round(count / 1e6) == millions


def test_a_factor_of_the_run_is_not_for_exact_arms_and_one_of_the_arm_is() -> None:
    arms = {"exact": {"method": "exact"}, "slow": {"method": "exact", "lr_factor": 0.5}, "pamm": {}}
    config = PretrainConfig.from_dict(VALUES | {"arms": arms, "lr_factor": 0.25})
    assert [config.lr_factor_of(arm) for arm in config.arms] == [1.0, 0.5, 0.25]
    again = {"again": {"method": "recompute"}}
    config = PretrainConfig.from_dict(VALUES | {"arms": again, "lr_factor": 0.25})
    assert config.lr_factor_of(config.arms[0]) == 1
    again["again"] |= {"lr_factor": 0.5}
    with pytest.raises(PammError, match=r"lr_factor of arm 'again' is 0\.5, but with method 'reco"):
        PretrainConfig.from_dict(VALUES | {"arms": again})


def test_a_wrong_name_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(
        PammError, match=r"'paper-3b' is no file and not in recipes/runs; .*paper-1b"
    ):
        PretrainConfig.load(Path("paper-3b"))
    with pytest.raises(PammError, match=r"'llama-61m' is no file.*llama-60m"):
        PretrainConfig.from_dict(VALUES | {"model": "llama-61m"})
