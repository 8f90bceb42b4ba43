import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import pamm
from pamm.integrations.transformers import PammCallback
from pamm.nn import groups
from pamm.stream import Stream
from tests.helpers import pamm_layers

CONFIG = pamm.PammConfig("pamm", 1 / 8)
SILENT = {"logging_strategy": "no"}


class Text(Dataset[dict[str, Tensor]]):
    """Random tokens, the same ones for the same index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )


def trainer(folder: Path, callback: PammCallback, model: Any = None, **changes: Any) -> Trainer:
    arguments: dict[str, Any] = {
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
    models = {"model_init": llama} if model is None else {"model": model}
    return Trainer(
        **models,
        args=TrainingArguments(**{**arguments, **changes}),
        train_dataset=Text(),
        callbacks=[callback],
    )


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(step, number of the draw within it) of every draw that is made."""
    seen: list[tuple[int, int]] = []
    draw = Stream.draw

    def spy(self: Stream, *args: Any, **kwargs: Any) -> Tensor:
        position = self.position
        seen.append((position >> 32, position & (1 << 32) - 1))
        return draw(self, *args, **kwargs)

    monkeypatch.setattr(Stream, "draw", spy)
    return seen


def test_the_model_is_converted_when_the_trainer_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, model = PammCallback(CONFIG), llama()
    with caplog.at_level(logging.INFO, logger="pamm"):
        trainer(tmp_path, callback, model)
    assert len(pamm_layers(model)) == 6
    assert callback.report is not None
    assert len(callback.report.converted) == 2
    assert caplog.text.count(str(callback.report)) == 1  # not again when training begins


def test_include_and_exclude_are_those_of_convert(tmp_path: Path) -> None:
    model = llama()
    trainer(tmp_path, PammCallback(CONFIG, include="model.layers.1.*"), model)
    assert [group.name.split(".")[2] for group in groups(model)] == ["1"]


def test_other_targets_and_wider_groups(tmp_path: Path) -> None:
    model = llama()
    trainer(tmp_path / "1", PammCallback(CONFIG, targets=("attention", "mlp")), model).train()
    assert len(pamm_layers(model)) == 10  # q, k, v, gate and up of two blocks
    parallel = PhiForCausalLM(
        PhiConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    trainer(tmp_path / "2", PammCallback(CONFIG, widen=True), parallel).train()
    assert [group.name for group in groups(parallel)] == [
        "model.layers.0.{self_attn.{q_proj,k_proj,v_proj},mlp.fc1}"
    ]


def test_the_side_file_of_a_model_converted_before_does_not_make_up_settings(
    tmp_path: Path,
) -> None:
    model = llama()
    pamm.convert(model, pamm.PammConfig("recompute"))
    trainer(tmp_path, PammCallback(CONFIG), model).train()
    written = json.loads((tmp_path / "checkpoint-4" / "pamm_config.json").read_text())
    assert written == {
        "groups": [f"model.layers.{n}.self_attn.{{q_proj,k_proj,v_proj}}" for n in range(2)]
    }


def test_a_model_converted_before_is_left_alone_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    pamm.convert(model, pamm.PammConfig("pamm", 1 / 2))
    before = groups(model)
    callback = PammCallback(CONFIG)
    trainer(tmp_path, callback, model).train()
    assert "stays as it is" in caplog.text
    assert groups(model) == before
    assert callback.report is None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks
def test_adapters_on_a_model_converted_before_are_converted(tmp_path: Path) -> None:
    model = llama()
    pamm.convert(model, CONFIG)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    trainer(tmp_path, PammCallback(CONFIG), adapted).train()
    assert {type(layer).__name__ for layer in pamm_layers(adapted)} == {"PammAdapterLinear"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks
def test_a_stage_that_trains_the_head_alone_keeps_converted_adapters(tmp_path: Path) -> None:
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    pamm.convert(model, CONFIG)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    trainer(tmp_path, PammCallback(CONFIG), model).train()
    assert len(pamm_layers(model)) == 4


def test_a_model_without_attention_is_an_error_and_not_a_silent_exact_run(tmp_path: Path) -> None:
    model = llama()
    for name in ("q_proj", "k_proj", "v_proj"):
        for layer in model.model.layers:
            layer.self_attn.__delattr__(name)
    with pytest.raises(pamm.NothingToConvertError, match="no attention projections"):
        trainer(tmp_path, PammCallback(CONFIG), model)


@pytest.mark.parametrize("method", ["pamm", "sampled", "recompute"])
@pytest.mark.parametrize("count", [1, 6])
def test_layers_that_are_replaced_after_conversion_are_an_error(
    tmp_path: Path, count: int, method: str
) -> None:
    """As Accelerate does when it prepares a model for fp8."""
    model = llama()
    made = trainer(tmp_path, PammCallback(pamm.PammConfig(method)), model)
    names = [
        name for name, _ in model.named_modules() if name[-6:] in ("q_proj", "k_proj", "v_proj")
    ]
    for name in names[:count]:
        parent, _, child = name.rpartition(".")
        old = model.get_submodule(name)
        new = type("Float8Linear", (torch.nn.Linear,), {})(old.in_features, old.out_features, False)
        setattr(model.get_submodule(parent), child, new)
    with pytest.raises(pamm.PammError, match=r"groups are gone|is Float8Linear, not nn\.Linear"):
        made.train()


def test_the_model_that_model_init_makes_anew_is_converted_too(tmp_path: Path) -> None:
    made = trainer(tmp_path, PammCallback(CONFIG))
    first = made.model
    made.train()
    assert made.model is not first
    assert len(pamm_layers(made.model)) == 6  # type: ignore[arg-type]


def test_each_forward_pass_of_an_accumulated_step_has_a_draw_of_its_own(
    tmp_path: Path, positions: list[tuple[int, int]]
) -> None:
    trainer(
        tmp_path, PammCallback(CONFIG), llama(), gradient_accumulation_steps=3, max_steps=2
    ).train()
    expected = [(step, micro) for step in range(2) for micro in range(3)]
    assert sorted(set(positions)) == expected
    assert len(positions) == 2 * len(expected)  # one for each of the two groups


def test_a_resumed_run_draws_and_ends_as_the_uninterrupted_one(
    tmp_path: Path, positions: list[tuple[int, int]]
) -> None:
    straight = llama()
    trainer(tmp_path, PammCallback(CONFIG), straight).train()
    drawn = positions[-4:]
    positions.clear()
    resumed = llama()
    trainer(tmp_path, PammCallback(CONFIG), resumed).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    assert positions == drawn == [(2, 0), (2, 0), (3, 0), (3, 0)]
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "config",
    [pamm.PammConfig("sampled", directions=64), pamm.PammConfig("subspace")],
    ids=str,
)
def test_a_resumed_run_goes_on_with_the_directions_it_had(
    tmp_path: Path, config: pamm.PammConfig
) -> None:
    straight, resumed = llama(), llama()
    trainer(tmp_path, PammCallback(config), straight).train()
    folder = tmp_path / "checkpoint-2"
    trainer(tmp_path, PammCallback(config), resumed).train(resume_from_checkpoint=str(folder))
    # Who serves a checkpoint takes all of these for weights.
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


class TestDirectionsOfACheckpointElsewhere:
    """``train(resume_from_checkpoint=...)`` does not tell callbacks where that is."""

    CONFIG = pamm.PammConfig("subspace")

    def run(self, folder: Path, seed: int = 0, **changes: Any) -> dict[str, Tensor]:
        """What the groups carry at the end of two steps of training, without a line in the log."""
        model, config = llama(), dataclasses.replace(self.CONFIG, seed=seed)
        made = trainer(folder, PammCallback(config), model, max_steps=2, **SILENT, **changes)
        made.train()
        return {name: tensor.clone() for name, tensor in pamm.carried(model).items()}

    def resumed(self, folder: Path, checkpoint: Path, **changes: Any) -> dict[str, Tensor]:
        """What the groups begin with when ``checkpoint`` goes on in another folder."""
        model, found = llama(), {}

        class Look(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                found.update({name: t.clone() for name, t in pamm.carried(model).items()})

        made = trainer(folder, PammCallback(self.CONFIG), model, max_steps=3, **SILENT, **changes)
        made.add_callback(Look())
        made.train(resume_from_checkpoint=str(checkpoint))
        return found

    def test_of_another_folder(self, tmp_path: Path) -> None:
        carried = self.run(tmp_path / "a")
        found = self.resumed(tmp_path / "b", tmp_path / "a" / "checkpoint-2")
        assert all(torch.equal(found[name], tensor) for name, tensor in carried.items())

    def test_not_those_of_the_same_step_of_another_run(self, tmp_path: Path) -> None:
        carried, others = self.run(tmp_path / "a"), self.run(tmp_path / "b", seed=1)
        found = self.resumed(tmp_path / "b", tmp_path / "a" / "checkpoint-2")
        assert all(torch.equal(found[name], tensor) for name, tensor in carried.items())
        assert not all(torch.equal(found[name], tensor) for name, tensor in others.items())

    @pytest.mark.parametrize("named", [False, True])
    def test_of_one_that_was_moved(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, named: bool
    ) -> None:
        carried = self.run(tmp_path / "a")
        self.run(tmp_path / "b", seed=1)
        moved = (tmp_path / "a" / "checkpoint-2").rename(tmp_path / "moved")
        changes = {"resume_from_checkpoint": str(moved)} if named else {}
        found = self.resumed(tmp_path / "b", moved, **changes)
        assert named == all(torch.equal(found[name], tensor) for name, tensor in carried.items())
        assert named != ("found anew" in caplog.text)
        passes = [int(tensor) for name, tensor in found.items() if name.endswith(".passes")]
        assert passes == ([2, 2] if named else [0, 0])

    def test_of_other_layers(self, tmp_path: Path) -> None:
        self.run(tmp_path / "a")
        callback = PammCallback(self.CONFIG, exclude="*layers.1*")
        made = trainer(tmp_path / "a", callback, llama(), max_steps=3, **SILENT)
        with pytest.raises(pamm.PammError, match="ratio and layers of the run that saved it"):
            made.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))


def test_checkpoints_are_those_of_the_exact_model(tmp_path: Path) -> None:
    model = llama()
    trainer(tmp_path, PammCallback(CONFIG), model).train()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert not pamm_layers(loaded)
    for one, other in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other)
