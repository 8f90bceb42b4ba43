"""``PammLinear`` in a model: exact where promised, inert when it should be, and intact."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import pamm
from pamm.config import METHODS
from pamm.nn import PammLinear, groups
from tests.helpers import (
    NAMES,
    Attention,
    Block,
    Model,
    counted_compressions,
    pamm_layers,
    saved_bytes,
    saved_tensors,
)

CONFIG = pamm.PammConfig("pamm", 1 / 8)


def outcome(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return y, {**grads, "input": x.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_everything_but_the_weights_of_q_k_and_v_is_bit_for_bit_exact(
    dtype: torch.dtype, dropout: float
) -> None:
    """With dropout in the model, equality also shows that the global random state is untouched."""
    model = Model(dropout=dropout).to(dtype)
    twin = copy.deepcopy(model)
    pamm.convert(twin, CONFIG)
    x = torch.randn(2, 20, 16, dtype=dtype)
    y, exact = outcome(model, x)
    y_twin, ours = outcome(twin, x)
    assert torch.equal(y, y_twin)
    approximate = {f"layers.{i}.attention.{name}.weight" for i in range(2) for name in NAMES}
    for name, grad in exact.items():
        if name in approximate:
            assert not torch.equal(ours[name], grad)
        else:
            assert torch.equal(ours[name], grad), name


def test_a_few_steps_with_every_row_kept_follow_exact_training() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    pamm.convert(twin, pamm.PammConfig("pamm", 1.0))
    x = torch.randn(2, 20, 16)
    for net in (model, twin):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
@pytest.mark.parametrize("method", METHODS)
def test_without_tokens_gradients_are_zero(method: str, shape: tuple[int, ...]) -> None:
    model = Block()
    pamm.convert(model, pamm.PammConfig(method), example=torch.randn(2, 8, 16))
    x = torch.zeros(shape, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == shape
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


class TestInert:
    """Frozen, eval, no_grad: nothing saved, no draw, the plain layer."""

    @pytest.fixture
    def attention(self) -> Attention:
        attention = Attention()
        pamm.convert(attention, CONFIG)
        return attention

    @pytest.fixture
    def x(self) -> torch.Tensor:
        return torch.randn(40, 16)

    def test_eval(self, attention: Attention, x: torch.Tensor) -> None:
        attention.eval()
        self.assert_inert(attention, x)
        x.requires_grad_()
        y = attention.q_proj(x)  # exact gradients in eval mode
        y.sum().backward()
        assert torch.allclose(attention.q_proj.weight.grad, y.new_ones(16, 40) @ x)

    def test_frozen(self, attention: Attention, x: torch.Tensor) -> None:
        attention.requires_grad_(False)
        with saved_tensors() as saved, pytest.warns(UserWarning, match="nothing to free"):
            self.assert_inert(attention, x.requires_grad_())
        assert saved_bytes(saved, list(attention.parameters())) == 0

    def test_frozen_weight_with_trained_bias(self, attention: Attention, x: torch.Tensor) -> None:
        for name in NAMES:
            getattr(attention, name).weight.requires_grad_(False)
        with saved_tensors() as saved, pytest.warns(UserWarning, match="nothing to free"):
            self.assert_inert(attention, x)
        assert saved_bytes(saved, list(attention.parameters())) == 0

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_no_grad(self, attention: Attention, x: torch.Tensor, context: object) -> None:
        with context(), saved_tensors() as saved:  # type: ignore[operator]
            self.assert_inert(attention, x)
        assert not saved

    @staticmethod
    def assert_inert(attention: Attention, x: torch.Tensor) -> None:
        group = groups(attention)[0]
        with counted_compressions([group]) as shapes:
            outputs = [getattr(attention, name)(x) for name in NAMES]
        assert not shapes
        assert group.stream.position == 0
        for name, y in zip(NAMES, outputs, strict=True):
            layer = getattr(attention, name)
            assert torch.equal(y, nn.functional.linear(x, layer.weight, layer.bias))

    def test_partly_frozen_group_still_compresses_for_the_rest(
        self, attention: Attention, x: torch.Tensor
    ) -> None:
        attention.q_proj.requires_grad_(False)
        with counted_compressions(groups(attention)) as shapes:
            for name in NAMES:
                getattr(attention, name)(x)
        assert len(shapes) == 1


class TestIntact:
    """Conversion changes classes and nothing else."""

    def test_parameters_state_dict_and_hooks(self) -> None:
        model = Model()
        calls: list[str] = []
        model.layers[0].attention.q_proj.register_forward_hook(lambda *_: calls.append("q"))
        parameters = dict(model.named_parameters())
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        pamm.convert(model, CONFIG)
        assert list(model.state_dict()) == list(state)
        assert all(parameters[name] is p for name, p in model.named_parameters())
        assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
        assert not list(model.buffers())
        model(torch.randn(1, 4, 16))
        assert calls == ["q"]
        assert pamm.revert(model) == 6
        assert all(parameters[name] is p for name, p in model.named_parameters())
        assert not pamm_layers(model)
        plain = Model().layers[0].attention.q_proj
        assert set(vars(model.layers[0].attention.q_proj)) == set(vars(plain))

    def test_an_optimizer_built_before_keeps_working(self) -> None:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 20, 16)).sum().backward()
        optimizer.step()
        before = optimizer.state_dict()["state"][0]["step"].item()
        pamm.convert(model, CONFIG)
        weight = model.layers[0].attention.q_proj.weight
        value = weight.detach().clone()
        model(torch.randn(2, 20, 16)).sum().backward()
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"].item() == before + 1
        assert not torch.equal(weight, value)

    @pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
    def test_copies_train_and_revert_like_the_original(self, way: str) -> None:
        model = Model()
        pamm.convert(model, CONFIG)
        if way == "deepcopy":
            twin = copy.deepcopy(model)
        elif way == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            torch.save(model, buffer := io.BytesIO())
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
        assert len(pamm_layers(twin)) == 6
        x = torch.randn(2, 20, 16)
        _, ours = outcome(model, x)
        _, theirs = outcome(twin, x)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert pamm.revert(twin) == 6
        assert len(pamm_layers(model)) == 6

    def test_weights_load_into_a_model_that_never_heard_of_pamm(self) -> None:
        model = Model()
        pamm.convert(model, CONFIG)
        torch.save(model.state_dict(), buffer := io.BytesIO())
        buffer.seek(0)
        plain = Model()
        plain.load_state_dict(torch.load(buffer, weights_only=True))
        x = torch.randn(1, 4, 16)
        assert torch.equal(plain(x), model(x))
        model.load_state_dict(plain.state_dict())

    def test_moving_to_another_dtype_and_device(self) -> None:
        model = Model()
        pamm.convert(model, CONFIG)
        model.to(torch.float64)
        model(torch.randn(2, 20, 16, dtype=torch.float64)).sum().backward()
        assert model.layers[0].attention.q_proj.weight.grad.dtype == torch.float64
        model.to("meta")
        assert (
            model(torch.randn(2, 20, 16, dtype=torch.float64, device="meta")).device.type == "meta"
        )

    def test_printing_the_model_shows_what_is_converted(self) -> None:
        model = Model()
        pamm.convert(model, CONFIG)
        text = repr(model)
        assert text.count("PammLinear(in_features=16, out_features=16, bias=True, group=") == 6
        assert "group=layers.1.attention.{q_proj,k_proj,v_proj}" in text


def test_is_a_linear_layer_for_everyone_who_asks() -> None:
    model = Model()
    pamm.convert(model, CONFIG)
    assert all(isinstance(layer, nn.Linear) for layer in pamm_layers(model))
    assert isinstance(model.layers[0].attention.q_proj, PammLinear)
    assert type(model.layers[0].attention.o_proj) is nn.Linear
