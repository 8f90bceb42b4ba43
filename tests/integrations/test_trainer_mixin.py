"""What ``PammTrainerMixin`` adds to a Trainer, on runs of a few steps."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import pamm
from pamm.integrations.transformers import PammCallback, PammTrainerMixin
from pamm.nn import groups
from tests.integrations.test_transformers import CONFIG, Text, llama


class PammTrainer(PammTrainerMixin, Trainer):
    pass


def trainer(folder: Path, model: Any = None, arguments: Any = None, **changes: Any) -> PammTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    return PammTrainer(
        model=model or llama(),
        args=TrainingArguments(**{**settings, **(arguments or {})}),
        train_dataset=Text(),
        **{"pamm": CONFIG, "pamm_lr_factor": 1.0, **changes},
    )


def rates(made: Trainer) -> dict[bool, set[float]]:
    """Learning rates of weights trained by PAMM (True), and of all others."""
    ours = {id(layer.weight) for group in groups(made.model) for layer in group.layers}  # type: ignore[arg-type]
    found: dict[bool, set[float]] = {True: set(), False: set()}
    for group in made.optimizer.param_groups:  # type: ignore[union-attr]
        for parameter in group["params"]:
            found[id(parameter) in ours].add(group["lr"])
    return found


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd", "adafactor"])
def test_weights_trained_by_pamm_have_a_rate_of_their_own(tmp_path: Path, optim: str) -> None:
    made = trainer(tmp_path, arguments={"learning_rate": 1e-3, "optim": optim}, pamm_lr_factor=0.25)
    made.create_optimizer()
    assert rates(made) == {True: {0.25e-3}, False: {1e-3}}
    grouped = [p for group in made.optimizer.param_groups for p in group["params"]]  # type: ignore[union-attr]
    assert len(grouped) == len(set(map(id, grouped))) == len(list(made.model.parameters()))  # type: ignore[union-attr]


def test_the_ratio_of_the_rates_survives_the_schedule(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        arguments={"learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_steps": 3},
        pamm_lr_factor=2.0,
    )
    seen = []
    step = made.training_step

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(rates(made))
        return step(*args, **kwargs)

    made.training_step = spy  # type: ignore[method-assign]
    made.train()
    assert [max(each[False]) for each in seen] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    for each in seen:
        assert each[True].pop() == pytest.approx(2 * each[False].pop())


def test_weight_decay_stays_with_the_weights(tmp_path: Path) -> None:
    made = trainer(tmp_path, arguments={"weight_decay": 0.1}, pamm_lr_factor=0.5)
    made.create_optimizer()
    decayed = {
        id(p)
        for group in made.optimizer.param_groups  # type: ignore[union-attr]
        if group["weight_decay"]
        for p in group["params"]
    }
    names = {name for name, p in made.model.named_parameters() if id(p) in decayed}  # type: ignore[union-attr]
    assert {name for name in names if "norm" in name} == set()
    assert sum("_proj" in name for name in names) == 2 * 7


def test_numbers_reach_tensorboard_beside_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    made = trainer(
        tmp_path, arguments={"report_to": "tensorboard", "max_steps": 5}, pamm_log_steps=2
    )
    made.train()
    assert made.pamm.report is not None
    name = made.pamm.report.converted[1].name
    with_numbers = [log for log in made.state.log_history if "pamm_held_bytes" in log]
    assert [log["step"] for log in with_numbers] == [1, 3, 5]  # logged after the step
    assert all("loss" in log for log in with_numbers)
    assert {log["pamm_held_bytes"] for log in with_numbers} == {made.pamm.report.held_bytes(32)}
    for log in with_numbers:
        assert 0 < log[f"pamm_cosine/{name}"] < 1
        assert 0 < log[f"pamm_relative_error/{name}"] < 2
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert f"train/pamm_cosine/{name}" in tags
    assert [each.step for each in events.Scalars("train/pamm_held_bytes")] == [1, 3, 5]


def test_measuring_does_not_change_the_training(tmp_path: Path) -> None:
    plain, watched = llama(), llama()
    arguments = {"gradient_accumulation_steps": 2}
    trainer(tmp_path / "1", plain, arguments).train()
    trainer(tmp_path / "2", watched, arguments, pamm_log_steps=1, pamm_log_layers=["*"]).train()
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_side_files_lie_beside_checkpoints_and_models(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train()
    made.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-2", "checkpoint-4", "final"):
        values = json.loads((tmp_path / folder / "pamm_config.json").read_text())
        assert len(values.pop("groups")) == 2
        assert pamm.PammConfig.from_dict(values) == CONFIG


def test_the_model_card_has_a_section_once(tmp_path: Path) -> None:
    made = trainer(tmp_path, pamm_lr_factor=0.5)
    made.train()
    made.create_model_card(model_name="tiny")
    made.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert card.count("## PAMM") == 1
    assert "ratio: 0.125" in card
    assert "lr_factor: 0.5" in card
    assert "- pamm" in card.partition("\n---\n")[0]  # the tag


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks
def test_the_model_card_calls_no_exact_gradient_approximate(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    names = ["q_proj", "k_proj", "v_proj"]
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=names))
    for name, model, approximate in (("a", adapted, False), ("b", llama(), True)):
        method = "sampled" if approximate else "recompute"
        made = trainer(tmp_path / name, model, pamm=pamm.PammConfig(method))
        made.create_model_card(model_name="tiny")
        card = (tmp_path / name / "README.md").read_text()
        assert ("were approximate" in card) == approximate
        assert "computed again in backward, exactly" in card


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"pamm_lr_factor": 0.25}, "pamm_lr_factor is 0.25, .* no weight that it is for"),
        ({"pamm_log_steps": 1}, "nothing to watch"),
    ],
)
def test_what_exact_gradients_have_no_use_for_is_refused(
    tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    made = trainer(tmp_path, pamm=pamm.PammConfig("recompute"), **changes)
    with pytest.raises(pamm.PammError, match=part):
        made.train()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks
def test_numbers_of_adapters_whose_gradients_are_exact_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    made = trainer(tmp_path, adapted, pamm=pamm.PammConfig("recompute"), pamm_log_steps=1)
    with pytest.raises(pamm.PammError, match="nothing to watch"):
        made.train()


def test_a_run_with_factor_and_numbers_resumes_to_the_same_weights(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"pamm_lr_factor": 0.25, "pamm_log_steps": 1}
    straight, resumed = llama(), llama()
    trainer(tmp_path, straight, **changes).train()
    trainer(tmp_path, resumed, **changes).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_loads_where_pamm_is_not_installed(tmp_path: Path) -> None:
    model = llama()
    trainer(tmp_path, model).train()
    script = (
        "import sys; sys.modules['pamm'] = None\n"
        "import torch; from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "logits = model(torch.arange(16)[None]).logits\n"
        "torch.save(logits.detach(), sys.argv[2])"
    )
    arguments = [str(tmp_path / "checkpoint-4"), str(tmp_path / "logits.pt")]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True)
    loaded = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert torch.equal(loaded, model.eval()(torch.arange(16)[None]).logits)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_activation_checkpointing_is_said(
    tmp_path: Path, checkpointing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(tmp_path, arguments={"activation_checkpointing": checkpointing})
    with caplog.at_level(logging.WARNING, logger="pamm"):
        made.train()
    assert ("activation checkpointing is on" in caplog.text) == checkpointing


def test_a_callback_may_be_given_in_place_of_a_config(tmp_path: Path) -> None:
    callback = PammCallback(CONFIG, include="model.layers.0.*")
    made = trainer(tmp_path, pamm=callback)
    assert made.pamm is callback
    assert len(groups(made.model)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"pamm_lr_factor": 0.0}, "pamm_lr_factor is 0.0"),
        ({"pamm_lr_factor": float("nan")}, "pamm_lr_factor is nan"),
        ({"pamm_lr_factor": "0.5"}, "pamm_lr_factor is '0.5'"),
        ({"pamm_log_steps": -1}, "pamm_log_steps is -1"),
        ({"pamm_log_steps": True}, "pamm_log_steps is True"),
        ({"pamm_log_steps": 1.5}, "pamm_log_steps is 1.5; give a whole number"),
        ({"pamm_log_layers": [0]}, r"pamm_log_layers is \[0\]; give a pattern"),
        ({"pamm": "sampled"}, "config is 'sampled'; give a PammConfig"),
        ({"pamm_log_steps": 1, "arguments": {"torch_compile": True}}, "not compiled"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(pamm.PammError, match=part):
        trainer(tmp_path, **changes)


def test_the_model_is_a_plain_llama_after_training_and_revert(tmp_path: Path) -> None:
    model = llama()
    trainer(tmp_path, model).train()
    assert pamm.revert(model) == 6
    assert type(model) is LlamaForCausalLM
