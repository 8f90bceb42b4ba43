"""torchtitan's override: with torchtitan where it is installed, else with a stub."""

import contextlib
import importlib
import importlib.util
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pamm
from pamm.nn import groups
from tests.helpers import counted_compressions
from tests.integrations import torchtitan_stub

pytestmark = pytest.mark.filterwarnings("ignore")
INSTALLED = importlib.util.find_spec("torchtitan") is not None
with (
    contextlib.nullcontext() if INSTALLED else torchtitan_stub.installed(),
    warnings.catch_warnings(action="ignore"),  # of torchtitan's own imports
):
    attention: Any = importlib.import_module("torchtitan.models.common.attention")
    Linear: Any = importlib.import_module("torchtitan.models.common.linear").Linear
    titan: Any = importlib.import_module("pamm.integrations.torchtitan")

WIDTH, HEADS, KV_HEADS = 32, 4, 2
HEAD = WIDTH // HEADS


def linear(out: int) -> Any:
    init = {"param_init": {"weight": nn.init.ones_}} if INSTALLED else {}
    return Linear.Config(in_features=WIDTH, out_features=out, **init)


def separate() -> Any:
    return attention.QKVLinear.Config(head_dim=HEAD, wq=linear(WIDTH), wkv=linear(KV_HEADS * HEAD))


def fused() -> Any:
    return attention.FusedQKVLinear.Config(
        head_dim=HEAD,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        wqkv=linear((HEADS + 2 * KV_HEADS) * HEAD),
    )


CONFIGS = pytest.mark.parametrize("config", [separate, fused])


def build(config: Any) -> Any:
    """As torchtitan does it: on meta, then with memory, then with weights, here always the same."""
    with torch.device("meta"):
        module = config.build()
    module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module.train()


def gradients(module: Any, x: Tensor) -> dict[str, Tensor]:
    torch.cat([y.flatten() for y in module(x)]).square().sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@CONFIGS
def test_outputs_and_input_gradients_are_exact_and_weights_are_compressed(config: Any) -> None:
    x = torch.randn(2, 16, WIDTH, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    plain, ours = build(config()), build(titan.qkv(config(), method="pamm", ratio="1/8"))
    assert list(ours.state_dict()) == list(plain.state_dict())
    for one, other in zip(ours(x), plain(x), strict=True):
        assert torch.equal(one, other)
    with counted_compressions(groups(ours)) as shapes:
        made, exact = gradients(ours, x), gradients(plain, twin)
    assert shapes == [(32, WIDTH)]
    assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]
    assert not any(torch.equal(made[name], grad) for name, grad in exact.items())
    whole = gradients(build(titan.qkv(config(), method="pamm", ratio=1.0)), x)
    for name, grad in exact.items():
        torch.testing.assert_close(whole[name], grad, rtol=1e-3, atol=1e-3)


@CONFIGS
def test_blocks_draw_rows_of_their_own(config: Any) -> None:
    device = torch.device("cpu")
    drawn = [
        groups(build(titan.qkv(config(), method="pamm", ratio="1/8")))[0]
        .stream.draw(64, 8, device)
        .tolist()
        for _ in range(3)
    ]
    assert len({tuple(rows) for rows in drawn}) == 3


def test_other_kinds_and_settings_are_refused() -> None:
    other = attention.BaseQKVLinear.Config(head_dim=8)
    with pytest.raises(pamm.PammError, match=r"BaseQKVLinear\.Config is no kind of q, k and v"):
        titan.qkv(other, method="pamm")
    with pytest.raises(pamm.PammError, match="did you mean 'ratio'"):
        titan.qkv(separate(), rato=1)
    with pytest.raises(pamm.PammError, match="needs the norm"):
        titan.qkv(separate(), method="recompute")


def test_linear_layers_of_a_converter_are_refused() -> None:
    class Float8Linear(Linear):
        pass

    module = separate().build()
    module.wk.__class__ = Float8Linear
    with pytest.raises(pamm.PammError, match="wk is Float8Linear"):
        titan._converted(module, pamm.PammConfig(), "qkv.0")


def test_tensor_parallelism_is_refused() -> None:
    module = build(titan.qkv(fused(), method="pamm"))
    with pytest.raises(pamm.PammError, match="tensor parallelism"):
        module.parallelize(SimpleNamespace(tp=2, spmd_backend="spmd_types"))
    build(titan.qkv(fused(), method="pamm")).parallelize(
        SimpleNamespace(tp=1, spmd_backend="spmd_types")
    )


@pytest.mark.skipif(not INSTALLED, reason="torchtitan is not installed")
def test_a_whole_model_takes_the_override_by_the_name_on_the_command_line() -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import _debugmodel

    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2)

    config = _debugmodel("flex")
    imports: Any = [("pamm.integrations.torchtitan.qkv", {"method": "pamm", "ratio": "1/8"})]
    apply_overrides(OverrideConfig(imports=imports), config)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    model.init_states()
    for block in model.layers.values():
        block.attention.inner_attention = Plain()  # flex attention would be compiled
    assert len(groups(model)) == 6
    positions = torch.arange(16).repeat(2, 1)
    model(torch.randint(2048, (2, 16)), positions=positions).float().square().mean().backward()
    grads = [block.attention.qkv_linear.wqkv.weight.grad for block in model.layers.values()]
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
    assert "layers.0.attention.qkv_linear.wq.weight" in model.state_dict()  # torchtitan's own split
