"""Frameworks that go around the layers are recognised by their marks, without being installed."""

from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pamm
from tests.helpers import Model, pamm_layers


def unsloth_forward(self: nn.Module, x: Tensor) -> Tensor:
    return x


unsloth_forward.__module__ = "unsloth.models.llama"


def fused_qkv(model: Model, _: pytest.MonkeyPatch) -> None:
    model.layers[1].attention.apply_qkv = lambda x: x


def unsloth(model: Model, _: pytest.MonkeyPatch) -> None:
    attention: Any = model.layers[1].attention
    attention.forward = MethodType(unsloth_forward, attention)


def zero3_parameters(model: Model, _: pytest.MonkeyPatch) -> None:
    model.layers[0].attention.q_proj.weight.ds_id = 0


def zero3_linear(_: Model, patch: pytest.MonkeyPatch) -> None:
    def linear(*arguments: Any) -> Tensor:
        raise AssertionError(arguments)

    linear.__module__ = "deepspeed.runtime.zero.linear"
    patch.setattr(F, "linear", linear)


@pytest.mark.parametrize(
    ("mark", "parts"),
    [
        (fused_qkv, ["layers.1.attention", "apply_qkv", "lora_qkv_kernel: false"]),
        (unsloth, ["layers.1.attention", "Unsloth", "unsloth.models.llama"]),
        (zero3_parameters, ["layers.0.attention.q_proj", "ZeRO-3", "FSDP2"]),
        (zero3_linear, ["F.linear", "ZeRO stage 1 or 2"]),
    ],
)
def test_a_bypass_is_refused_with_the_reason(
    mark: Any, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    mark(model, monkeypatch)
    with pytest.raises(pamm.PammError) as error:
        pamm.convert(model)
    for part in parts:
        assert part in str(error.value)
    assert not pamm_layers(model)


@pytest.mark.parametrize("kind", ["Float8Linear", "Linear4bit", "QuantLinear"])
def test_linear_layers_of_quantisers_are_refused_by_name(kind: str) -> None:
    model = Model(layers=1)
    model.layers[0].attention.k_proj.__class__ = type(kind, (nn.Linear,), {})
    with pytest.raises(pamm.NothingToConvertError, match=f"k_proj is {kind}"):
        pamm.convert(model)


def test_plain_models_pass() -> None:
    model = Model()
    assert len(pamm.convert(model).converted) == 2
    model(torch.randn(2, 4, 16)).sum().backward()
