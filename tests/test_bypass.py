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


def fused_by_name(model: Model, _: pytest.MonkeyPatch) -> None:
    def apply_lora_qkv(self: nn.Module, x: Tensor) -> Tensor:
        return x

    attention: Any = model.layers[1].attention
    attention.apply_qkv = MethodType(apply_lora_qkv, attention)


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
        (fused_by_name, ["layers.1.attention", "apply_qkv", "lora_qkv_kernel: false"]),
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


def test_a_linear_layer_of_another_library_is_named_in_full() -> None:
    model = Model(layers=1)
    other = type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch"})
    model.layers[0].attention.k_proj = other()
    with pytest.raises(pamm.NothingToConvertError, match=r"is transformer_engine\.pytorch\.Linear"):
        pamm.convert(model)


def test_axolotls_apply_qkv_that_calls_the_layers_passes() -> None:
    """It is there with any of the kernels, such as lora_o_kernel."""

    def original_apply_qkv(self: nn.Module, x: Tensor) -> Tensor:
        return x

    model = Model()
    attention: Any = model.layers[0].attention
    attention.apply_qkv = MethodType(original_apply_qkv, attention)
    assert len(pamm.convert(model, pamm.PammConfig("pamm")).converted) == 2


def test_a_fused_mlp_is_skipped_with_the_reason_and_attention_is_converted() -> None:
    def apply_lora_mlp(self: nn.Module, x: Tensor) -> Tensor:
        return x

    apply_lora_mlp.__module__ = "axolotl.kernels.lora"
    model = Model(layers=1)
    mlp: Any = nn.ModuleDict({"gate_proj": nn.Linear(16, 16), "up_proj": nn.Linear(16, 16)})
    mlp.forward = MethodType(apply_lora_mlp, mlp)
    model.layers[0].mlp = mlp
    report = pamm.convert(model, pamm.PammConfig("pamm"), targets=("attention", "mlp"))
    assert [group.name for group in report.converted] == [
        "layers.0.attention.{q_proj,k_proj,v_proj}"
    ]
    assert "layers.0.mlp computes them in a fused function" in report.skipped[0].reason
    assert "lora_mlp_kernel: false" in report.skipped[0].reason


@pytest.mark.filterwarnings("ignore")  # of the library's own import
def test_torchaos_fp8_layers() -> None:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    model = Model(layers=1)
    float8.convert_to_float8_training(model, module_filter_fn=lambda m, name: "attention" in name)
    with pytest.raises(pamm.NothingToConvertError, match=r"q_proj is Float8Linear, not nn\.Linear"):
        pamm.convert(model)


@pytest.mark.filterwarnings("ignore")
def test_torchaos_quantised_weights() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = Model(width=64, layers=1)
    quantization.quantize_(model.layers[0].attention, quantization.Int8WeightOnlyConfig())
    with pytest.raises(pamm.NothingToConvertError, match=r"not a plain Parameter|frozen"):
        pamm.convert(model)


def test_plain_models_pass() -> None:
    model = Model()
    assert len(pamm.convert(model, pamm.PammConfig("pamm")).converted) == 2
    model(torch.randn(2, 4, 16)).sum().backward()
