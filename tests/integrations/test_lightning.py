"""Lightning's Trainer with the callback, on runs of a few steps."""

import contextlib
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pamm
from pamm.nn import groups
from pamm.stream import Stream
from tests.helpers import Model, pamm_layers

pytest.importorskip("lightning")
peft = pytest.importorskip("peft")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Lightning's own imports
    import lightning

    from pamm.integrations.lightning import PammCallback

CONFIG = pamm.PammConfig("pamm", 1 / 8)
NAMES = "model.layers.{}.attention.{{q_proj,k_proj,v_proj}}"
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning advises on workers, logging and more


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model: Any = Model(dropout=0.1)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        x, y = batch
        return (self.model(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = pamm.param_groups(self, lr=1e-2, lr_factor=0.5)
        return torch.optim.AdamW(groups)


class Late(Regression):
    """Makes its model in ``configure_model``."""

    converts = True

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Model()
            if self.converts:
                pamm.convert(self.model, CONFIG)


def data(count: int = 24) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(count, 8, width, generator=generator) for width in (16, 4))
    return DataLoader(TensorDataset(x, y), batch_size=4)


def trainer(folder: Path, *callbacks: Any, **changes: Any) -> lightning.Trainer:
    settings = {
        "default_root_dir": folder,
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 4,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return lightning.Trainer(callbacks=list(callbacks), **(settings | changes))


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(step, number of the draw within it) of every draw of one of the two groups."""
    seen: list[tuple[int, int]] = []
    draw = Stream.draw

    def spy(self: Stream, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((self.position >> 32, self.position & (1 << 32) - 1))
        return draw(self, *args, **kwargs)

    monkeypatch.setattr(Stream, "draw", spy)
    return seen


def test_the_module_is_converted_and_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, callback = Regression(), PammCallback(CONFIG)
    before = [parameter.clone() for parameter in module.parameters()]
    with caplog.at_level(logging.INFO, logger="pamm"):
        trainer(tmp_path, callback).fit(module, data())
    assert len(pamm_layers(module)) == 6
    assert [group.name for group in groups(module)] == [NAMES.format(0), NAMES.format(1)]
    assert str(callback.report) in caplog.text
    for one, other in zip(before, module.parameters(), strict=True):
        assert not torch.equal(one, other)


def test_each_accumulated_pass_has_a_draw_of_its_own(
    tmp_path: Path, positions: list[tuple[int, int]]
) -> None:
    settings = {"accumulate_grad_batches": 3, "max_steps": 2}
    trainer(tmp_path, PammCallback(CONFIG), **settings).fit(Regression(), data())
    expected = [(step, micro) for step in range(2) for micro in range(3)]
    assert sorted(set(positions)) == expected
    assert len(positions) == 2 * len(expected)


def test_a_resumed_run_ends_as_the_uninterrupted_one(
    tmp_path: Path, positions: list[tuple[int, int]]
) -> None:
    straight, first, resumed = Regression(), Regression(), Regression()
    for module in (straight, first, resumed):
        for block in module.model.layers:
            block.attention.dropout = 0.0  # Lightning does not restore the random state
    # One batch an epoch: in the middle of one Lightning does not find its place in the data again.
    trainer(tmp_path, PammCallback(CONFIG)).fit(straight, data(count=4))
    drawn = positions[-4:]
    begun = trainer(tmp_path, PammCallback(CONFIG), max_steps=2)
    begun.fit(first, data(count=4))
    begun.save_checkpoint(tmp_path / "half.ckpt")
    positions.clear()
    trainer(tmp_path, PammCallback(CONFIG)).fit(
        resumed, data(count=4), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    assert positions == drawn == [(2, 0), (2, 0), (3, 0), (3, 0)]
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_checkpoints_have_nothing_of_pamm(tmp_path: Path) -> None:
    module, made = Regression(), trainer(tmp_path, PammCallback(CONFIG))
    made.fit(module, data())
    made.save_checkpoint(tmp_path / "model.ckpt")
    weights = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    plain = Regression()
    plain.load_state_dict(weights)
    assert not pamm_layers(plain)


def test_a_module_converted_before_is_left_alone(tmp_path: Path) -> None:
    module, callback = Regression(), PammCallback(CONFIG)
    pamm.convert(module, pamm.PammConfig("pamm", 1 / 2))
    before = groups(module)
    trainer(tmp_path, callback).fit(module, data())
    assert groups(module) == before
    assert callback.report is None


def test_a_stage_that_trains_the_head_alone_keeps_converted_adapters(tmp_path: Path) -> None:
    module = Regression()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj", "v_proj"]), module.model)
    pamm.convert(module, CONFIG, example=torch.zeros(2, 8, 16))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("head" in name)
    trainer(tmp_path, PammCallback(CONFIG)).fit(module, data())
    assert len(pamm_layers(module)) == 4


def test_other_targets_and_selectors(tmp_path: Path) -> None:
    module = Regression()
    settings: dict[str, Any] = {"example": {"x": torch.zeros(1, 8, 16)}, "widen": True}
    module.model.layers[0].attention.gate_proj = torch.nn.Linear(16, 16)
    module.forward = lambda x: module.model(x)  # type: ignore[method-assign]
    with pytest.raises(pamm.NothingToConvertError, match="no mlp projections named gate_proj"):
        trainer(tmp_path, PammCallback(CONFIG, targets="mlp", **settings)).fit(module, data())
    callback = PammCallback(CONFIG, exclude="*layers.1*", **settings)
    trainer(tmp_path, callback).fit(module, data())
    assert callback.report is not None
    assert callback.report.problem is None
    assert [group.name for group in groups(module)] == [NAMES.format(0)]


def test_inputs_may_be_computed_again(tmp_path: Path) -> None:
    class Forward(Regression):
        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    module = Forward()
    callback = PammCallback(pamm.PammConfig("recompute"), example=torch.zeros(1, 8, 16))
    trainer(tmp_path, callback).fit(module, data())
    assert pamm.revert(module) == 6


def test_a_resumed_run_has_the_directions_it_had(tmp_path: Path) -> None:
    config = pamm.PammConfig("subspace")
    module, made = Regression(), trainer(tmp_path, PammCallback(config))
    made.fit(module, data(count=4))
    made.save_checkpoint(tmp_path / "model.ckpt")
    resumed = Regression()
    # No step is left: what is loaded stays as it is.
    trainer(tmp_path, PammCallback(config)).fit(
        resumed, data(count=4), ckpt_path=tmp_path / "model.ckpt", weights_only=True
    )
    before, after = pamm.carried(module), pamm.carried(resumed)
    assert before.keys() == after.keys()
    assert len(before) == 4
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name])
        assert tensor.any()


@pytest.mark.parametrize("method", ["pamm", "subspace"])
def test_directions_that_a_checkpoint_does_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Those of a method without any are found anew; those of other layers are an error."""
    made = trainer(tmp_path, PammCallback(pamm.PammConfig(method)))  # type: ignore[arg-type]
    made.fit(Regression(), data(count=4))
    made.save_checkpoint(tmp_path / "model.ckpt")
    exclude = "*layers.1*" if method == "subspace" else None
    resumed = trainer(tmp_path, PammCallback(pamm.PammConfig("subspace"), exclude=exclude))
    refused = pytest.raises(pamm.PammError, match="missing here")
    with refused if exclude else contextlib.nullcontext():
        resumed.fit(
            Regression(), data(count=4), ckpt_path=tmp_path / "model.ckpt", weights_only=True
        )
    assert ("found anew" in caplog.text) == (exclude is None)


def test_a_model_made_in_configure_model_converts_itself(tmp_path: Path) -> None:
    module = Late()
    trainer(tmp_path, PammCallback()).fit(module, data())
    assert len(pamm_layers(module)) == 6


def test_one_that_does_not_is_an_error_and_not_a_silent_exact_run(tmp_path: Path) -> None:
    module = Late()
    module.converts = False
    with pytest.raises(pamm.PammError, match=r"call pamm\.convert there"):
        trainer(tmp_path, PammCallback()).fit(module, data())


@pytest.mark.parametrize("on", [True, False])
def test_activation_checkpointing_is_said(
    tmp_path: Path, on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = Regression()
    module.model.gradient_checkpointing = on
    with caplog.at_level(logging.WARNING, logger="pamm"):
        trainer(tmp_path, PammCallback(CONFIG)).fit(module, data())
    assert ("activation checkpointing is on" in caplog.text) == on


def test_validation_alone_converts_nothing(tmp_path: Path) -> None:
    module = Regression()
    module.validation_step = module.training_step  # type: ignore[method-assign]
    trainer(tmp_path, PammCallback(CONFIG)).validate(module, data(), verbose=False)
    assert not pamm_layers(module)
