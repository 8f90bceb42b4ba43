import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, TrainingArguments
from typer.testing import CliRunner

from pamm.cli import app
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.recipes.checkpoints import last_checkpoint
from pamm.recipes.commit import commit
from pamm.recipes.files import finite, read_json, read_json_lines
from pamm.recipes.pretraining import training
from pamm.recipes.pretraining.model import build, llama_config
from pamm.recipes.pretraining.results import perplexity
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import prepare
from pamm.recipes.pretraining.training import train_arm
from pamm.recipes.settings import Arm
from pamm.recipes.stop import Stop
from tests.recipes.helpers import StopAfter, config, lines, quiet


def run(folder: Path, made: PretrainConfig, stop: Stop | None = None, arm: int = -1) -> bool:
    """Train one arm of a run; by default the last one, which is PAMM's."""
    folder.mkdir(exist_ok=True)
    tokens, chosen = prepare(made, folder, quiet()), made.arms[arm]
    return train_arm(made, chosen, folder / chosen.folder, tokens, quiet(), stop or Stop())


def weights(folder: Path, step: int = 6) -> dict[str, Tensor]:
    return load_file(folder / f"checkpoint-{step}" / "model.safetensors")


@pytest.mark.parametrize("stops", [(1,), (2,), (3, 2)], ids=str)
def test_an_interrupted_arm_ends_bit_for_bit_where_it_would_have(
    tmp_path: Path, stops: tuple[int, ...]
) -> None:
    made = config(tmp_path)
    assert run(tmp_path / "straight", made)
    for steps in stops:
        assert not run(tmp_path / "halting", made, StopAfter(steps))
        assert not (tmp_path / "halting/pamm-1-16/result.json").exists()
    assert run(tmp_path / "halting", made)

    one, other = tmp_path / "straight/pamm-1-16", tmp_path / "halting/pamm-1-16"
    expected = weights(one)
    assert all(torch.equal(value, expected[name]) for name, value in weights(other).items())
    assert lines(other) == lines(one)
    kept = ("validation_loss", "perplexity", "held_bytes", "predicted_bytes")
    results = [read_json(folder / "result.json") for folder in (one, other)]
    assert [results[0][key] for key in kept] == [results[1][key] for key in kept]


def test_adamw_gets_the_betas_and_the_decay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    made = torch.optim.AdamW

    def recorded(groups: Any, **options: Any) -> torch.optim.AdamW:
        optimizer = made(groups, **options)
        seen.extend(optimizer.param_groups)
        return optimizer

    monkeypatch.setattr(torch.optim, "AdamW", recorded)
    run(tmp_path, config(tmp_path, beta2=0.95, weight_decay=0.1, steps=1))
    assert {group["betas"] for group in seen} == {(0.9, 0.95)}
    assert {group["weight_decay"] for group in seen} == {0.0, 0.1}


def test_the_last_checkpoint_may_be_left_out(tmp_path: Path) -> None:
    made = config(tmp_path)
    tokens, arm = prepare(made, tmp_path, quiet()), made.arms[0]
    assert train_arm(made, arm, tmp_path / "exact", tokens, quiet(), Stop(), keep_last=False)
    assert last_checkpoint(tmp_path / "exact")[1] == 4
    assert (tmp_path / "exact/result.json").exists()


def test_a_kill_loses_what_came_after_the_last_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    made = config(tmp_path)
    assert run(tmp_path / "straight", made)
    run(tmp_path / "killed", made, StopAfter(4))
    folder = tmp_path / "killed/pamm-1-16"
    # As if step 5 had been done, logged, and its checkpoint half written when the kill came.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0, "lr": 0, "tokens": 1, "seconds": 1}\n{"step": 6, "lo')
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "model.safetensors").write_text("half of")

    assert run(tmp_path / "killed", made)
    assert not (folder / "checkpoint-5").exists()
    assert lines(folder) == lines(tmp_path / "straight/pamm-1-16")
    expected = weights(tmp_path / "straight/pamm-1-16")
    assert all(torch.equal(value, expected[name]) for name, value in weights(folder).items())


def test_metrics_have_a_line_for_every_step_and_every_validation(tmp_path: Path) -> None:
    made = config(tmp_path, steps=5, eval_every=2, global_batch=8)
    run(tmp_path, made)
    metrics = read_json_lines(tmp_path / "pamm-1-16/metrics.jsonl")
    steps = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in metrics if "eval_loss" in line] == [2, 4, 5]
    assert steps[-1]["tokens"] == 5 * 2 * 4 * 16
    seconds = [line["seconds"] for line in steps]
    assert seconds == sorted(seconds)
    assert max(line["lr"] for line in steps) == pytest.approx(1e-2)
    assert 1e-3 < steps[-1]["lr"] < 5e-3  # a cosine, on its way to a tenth
    assert (tmp_path / "pamm-1-16/tensorboard").is_dir()
    assert len(list((tmp_path / "pamm-1-16").glob("checkpoint-*"))) == 1


def test_the_result_says_what_was_measured(tmp_path: Path) -> None:
    made = config(tmp_path)
    run(tmp_path, made, arm=0)
    run(tmp_path, made, arm=1)
    exact, approximate = (read_json(tmp_path / f"{n}/result.json") for n in ("exact", "pamm-1-16"))
    tokens, k, width, layers = 64, 4, 32, 2
    assert exact["held_bytes"] == exact["predicted_bytes"] == layers * tokens * width * 4
    assert approximate["held_bytes"] == approximate["predicted_bytes"]
    assert approximate["held_bytes"] == layers * (k * width * 4 + tokens * (4 + 1) + 4)
    assert approximate["paper_bytes"] == layers * (3 * k * width * 4 + 8 * tokens)
    assert exact["paper_bytes"] is None
    last = [line for line in lines(tmp_path / "exact") if "eval_loss" in line][-1]
    assert exact["validation_loss"] == last["eval_loss"]
    assert exact["perplexity"] == pytest.approx(perplexity(exact["validation_loss"]))
    assert exact["perplexity"] < 300, "it learns"
    assert exact["parameters"] == approximate["parameters"]
    assert exact["tokens_per_second"] > 0
    assert exact["peak_bytes"] > 100 << 20


def test_the_result_has_the_commit_that_the_training_began_with(tmp_path: Path) -> None:
    run(tmp_path, config(tmp_path, steps=1), arm=0)
    assert read_json(tmp_path / "exact/result.json")["versions"]["commit"] == commit()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER"),
        ("ACCELERATE_USE_FSDP", "true"),
    ],
)
def test_the_run_decides_how_it_is_trained_not_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    made = config(tmp_path, steps=2)
    run(tmp_path / "alone", made)
    monkeypatch.setenv(name, value)
    run(tmp_path / "launched", made)
    assert lines(tmp_path / "launched/pamm-1-16") == lines(tmp_path / "alone/pamm-1-16")
    assert name not in os.environ


def test_bytes_under_autocast_are_those_of_the_dtype_that_layers_compute_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: fp32 weights, bf16 autocast."""
    arguments = training._arguments

    def bf16(*args: Any) -> TrainingArguments:
        return dataclasses.replace(arguments(*args), bf16=True)

    monkeypatch.setattr(training, "_arguments", bf16)
    made = config(tmp_path, steps=2)
    run(tmp_path, made, arm=0)
    run(tmp_path, made, arm=1)
    exact, approximate = (read_json(tmp_path / f"{n}/result.json") for n in ("exact", "pamm-1-16"))
    assert exact["precision"] == "bf16 autocast"
    assert exact["predicted_bytes"] == 2 * 64 * 32 * 2
    assert exact["held_bytes"] == 3 * exact["predicted_bytes"]  # autocast casts X for q, k and v
    assert approximate["held_bytes"] == approximate["predicted_bytes"]


def test_arms_begin_with_the_same_weights_and_see_the_same_batches(tmp_path: Path) -> None:
    """With every row a generator PAMM is exact up to rounding, all through the run."""
    arms = (
        Arm("exact", PammConfig(method="exact")),
        Arm("all", PammConfig("pamm", 1.0)),
        Arm("slow", PammConfig("pamm", 1.0), lr_factor=0.01),
    )
    made = config(tmp_path, arms=arms)
    for number in range(3):
        run(tmp_path, made, arm=number)
    exact, every, slow = (lines(tmp_path / arm.folder) for arm in arms)
    assert exact[0] == every[0] == slow[0]
    assert [line["loss"] for line in every if "loss" in line] == pytest.approx(
        [line["loss"] for line in exact if "loss" in line], rel=1e-3
    )
    assert slow[-1]["eval_loss"] != pytest.approx(exact[-1]["eval_loss"], rel=1e-3)


def test_a_loss_that_is_not_finite_is_shown_as_such(tmp_path: Path) -> None:
    made = config(tmp_path, lr=1e30, steps=4)
    run(tmp_path, made)
    result = read_json(tmp_path / "pamm-1-16/result.json")
    assert result["validation_loss"] is None
    assert result["perplexity"] is None
    for line in (tmp_path / "pamm-1-16/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ({"hidden_sise": 32}, ["no key 'hidden_sise'", "did you mean 'hidden_size'"]),
        ({"hidden_size": "wide"}, ["no LLaMA", "hidden_size"]),
        ({"hidden_size": 30, "num_attention_heads": 4}, ["no LLaMA", "30"]),
        ({"hidden_size": 0}, ["no LLaMA"]),
        ({"vocab_size": 100}, ["vocab_size of the model is 100", "needs 300 or more"]),
        ({"max_position_embeddings": 8}, ["max_position_embeddings", "is 8", "16 or more"]),
        ({"model_type": "gpt2"}, ["'gpt2'", "trains LLaMA"]),
    ],
)
def test_models_that_are_refused(tmp_path: Path, model: dict[str, Any], parts: list[str]) -> None:
    made = config(tmp_path, model=model)
    tokens = prepare(made, tmp_path, quiet())
    with pytest.raises(PammError) as caught:
        llama_config(made, tokens)
    for part in parts:
        assert part in str(caught.value)


def test_flash_attention_is_refused_where_it_is_not_installed(tmp_path: Path) -> None:
    """By the command, before anything is trained."""
    made = config(tmp_path, attention="flash_attention_2")
    (tmp_path / "run.yaml").write_text(made.to_yaml())
    arguments = ["pretrain", "--config", str(tmp_path / "run.yaml"), "--output", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "flash-attn is not installed here" in done.output
    assert "pip install flash-attn" in done.output
    assert not (tmp_path / "tiny/config.yaml").exists()


def test_flash_attention_is_what_the_model_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pamm.recipes.pretraining.model.is_flash_attn_2_available", lambda: True)
    asked = []
    monkeypatch.setattr("pamm.recipes.pretraining.model.LlamaForCausalLM", asked.append)
    made = config(tmp_path)
    tokens = prepare(made, tmp_path, quiet())
    monkeypatch.setattr("pamm.recipes.pretraining.model.llama_config", lambda *given: LlamaConfig())
    build(dataclasses.replace(made, attention="flash_attention_2"), tokens)
    assert asked[0]._attn_implementation == "flash_attention_2"


def test_a_model_file_as_published_is_accepted(tmp_path: Path) -> None:
    published = {
        "architectures": ["LLaMAForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "initializer_range": 0.02,
        "max_sequence_length": 1024,
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pad_token_id": -1,
        "rms_norm_eps": 1e-06,
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": 32000,
    }
    (tmp_path / "llama.json").write_text(json.dumps(published))
    made = config(tmp_path, model=str(tmp_path / "llama.json"))
    assert llama_config(made, prepare(made, tmp_path, quiet())).vocab_size == 32000


def test_numbers_that_json_has_not() -> None:
    assert finite(float("nan")) is finite(float("inf")) is None
    assert finite(1.5) == 1.5
    assert perplexity(1e6) == float("inf")


def test_blocks_computed_again_in_backward_train_the_same(tmp_path: Path) -> None:
    made = config(tmp_path)
    run(tmp_path / "plain", made, arm=0)
    run(tmp_path / "again", dataclasses.replace(made, activation_checkpointing=True), arm=0)
    assert lines(tmp_path / "again/exact") == lines(tmp_path / "plain/exact")


@pytest.mark.parametrize(
    ("targets", "layers"), [("attention", ("q", "k", "v")), ("mlp", ("gate", "up"))]
)
def test_exact_training_with_a_reduced_rate_takes_it_for_the_targets(
    tmp_path: Path, targets: str, layers: tuple[str, ...]
) -> None:
    """Of the same gradients: with a rate near 0 they stay where they began."""
    still_arm = Arm("still", PammConfig("exact"), lr_factor=1e-9, targets=targets)
    arms = (Arm("exact", PammConfig("exact")), still_arm)
    made = config(tmp_path, arms=arms, save_every=1)
    run(tmp_path / "first", dataclasses.replace(made, steps=1, lr=1e-12), arm=0)
    first = weights(tmp_path / "first/exact", step=1)
    run(tmp_path / "whole", made, arm=1)
    last = weights(tmp_path / "whole/still")
    moved = {
        name
        for name, value in last.items()
        if not torch.allclose(value, first[name], atol=1e-6, rtol=0)
    }
    still = {name for name in last if any(f".{part}_proj" in name for part in layers)}
    assert len(still) == 2 * len(layers)
    assert moved == set(last) - still


def test_gate_and_up_are_trained_from_some_of_the_tokens(tmp_path: Path) -> None:
    sampled = Arm("some", PammConfig("sampled", 1 / 4), lr_factor=1, targets="mlp")
    made = config(tmp_path, arms=(Arm("exact", PammConfig("exact")), sampled))
    for arm in (0, 1):
        run(tmp_path / "run", made, arm=arm)
    exact, some = (read_json(tmp_path / f"run/{arm}/result.json") for arm in ("exact", "some"))
    assert exact["groups"] == some["groups"] == 2
    assert some["held_bytes"] == some["predicted_bytes"] == 2 * 8
    assert exact["perplexity"] != some["perplexity"]


def test_sharing_weights_needs_gpus() -> None:
    """Accelerate would train copies instead, without a word."""
    trainer: Any = SimpleNamespace(args=SimpleNamespace(fsdp=True), is_fsdp_enabled=False)
    with pytest.raises(PammError, match="Accelerate found none"):
        training._check_shared(trainer)
