"""Parameter groups: the learning-rate factor, and what is decayed."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import pamm
from tests.helpers import Model


def test_only_the_weights_of_converted_layers_are_reduced() -> None:
    model = Model()
    pamm.convert(model, pamm.PammConfig("pamm"))
    groups = {
        g["name"]: g for g in pamm.param_groups(model, lr=1e-3, lr_factor=0.25, weight_decay=0.1)
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = {key: {names[id(p)] for p in group["params"]} for key, group in groups.items()}
    assert set(groups) == {"pamm_decay", "other_decay", "other_no_decay"}
    assert listed["pamm_decay"] == {
        f"layers.{i}.attention.{n}.weight" for i in range(2) for n in ("q_proj", "k_proj", "v_proj")
    }
    assert "layers.0.attention.q_proj.bias" in listed["other_no_decay"]
    assert "layers.0.norm.weight" in listed["other_no_decay"]
    assert "head.weight" in listed["other_decay"]
    assert set.union(*listed.values()) == set(names.values())
    assert groups["pamm_decay"]["lr"] == 2.5e-4
    assert groups["other_decay"]["lr"] == groups["other_no_decay"]["lr"] == 1e-3
    assert groups["pamm_decay"]["weight_decay"] == groups["other_decay"]["weight_decay"] == 0.1
    assert groups["other_no_decay"]["weight_decay"] == 0


def test_frozen_and_tied_parameters() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["c"].requires_grad_(False)
    groups = pamm.param_groups(model, lr=1.0, lr_factor=0.5)
    assert sum(len(group["params"]) for group in groups) == 3


def test_a_factor_where_all_gradients_are_exact_is_refused() -> None:
    model = Model()
    pamm.convert(model, pamm.PammConfig("recompute"), example=torch.zeros(2, 20, 16))
    assert len(pamm.param_groups(model, lr=1.0, lr_factor=1.0)) == 2
    with pytest.raises(pamm.PammError, match=r"lr_factor is 0.25, .* no weight that it is for"):
        pamm.param_groups(model, lr=1.0, lr_factor=0.25)


def test_schedulers_keep_the_factor() -> None:
    model = Model()
    pamm.convert(model, pamm.PammConfig("pamm"))
    optimizer = torch.optim.AdamW(pamm.param_groups(model, lr=1.0, lr_factor=0.25))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates["pamm_decay"] == pytest.approx(0.25 * rates["other_decay"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0}, "lr is 0; give a number above 0"),
        ({"lr": True}, "lr is True"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": math.inf}, "lr is inf"),
        ({"lr": "1e-3"}, "lr is '1e-3'; give a number above 0"),
        ({"lr": torch.tensor([1.0, 2.0])}, r"lr is tensor\(.*; give a number"),
        ({"lr_factor": None}, "lr_factor is None"),
        ({"weight_decay": None}, "weight_decay is None"),
        ({"model": [nn.Parameter(torch.ones(2))]}, "model is list; give the model itself"),
        ({"lr_factor": -1}, "lr_factor is -1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; give a number, 0 or above"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(pamm.PammError, match=message):
        pamm.param_groups(**{"model": Model(), "lr": 1.0, "lr_factor": 1.0, **arguments})
