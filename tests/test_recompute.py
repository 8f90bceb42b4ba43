"""Computing X again in backward: exact, once for each group, and with nothing of X kept."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn

import pamm
from pamm.analysis.memory import saved_bytes as saved_bytes_of
from pamm.recomputation import Recomputation
from pamm.recompute import attach, detach, group_layers
from tests.helpers import (
    NAMES,
    Block,
    Model,
    pamm_layers,
    saved_bytes,
    saved_tensors,
    tensor_with_finaliser,
)


def attached(model: Model, mlp: bool = False) -> Model:
    for layer in model.layers:
        attach(layer.norm, [getattr(layer.attention, name) for name in NAMES])
        if mlp:
            attach(layer.mlp_norm, [layer.mlp[0]])
    return model


@pytest.fixture
def recomputations(monkeypatch: pytest.MonkeyPatch) -> list[Recomputation]:
    """One entry for each time that an output is computed again."""
    seen: list[Recomputation] = []
    original = Recomputation._recompute

    def counting(self: Recomputation, h: Tensor) -> None:
        seen.append(self)
        original(self, h)

    monkeypatch.setattr(Recomputation, "_recompute", counting)
    return seen


def outcome(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    torch.manual_seed(5)
    x = x.detach().requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = model(x)
    y.float().square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    return {**grads, "y": y.detach(), "x": x.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("mlp", [False, True])
def test_everything_is_exact_bit_for_bit(
    dtype: torch.dtype, autocast: torch.dtype | None, mlp: bool
) -> None:
    model = Model(dropout=0.3).to(dtype)
    twin = attached(copy.deepcopy(model), mlp)
    x = torch.randn(2, 20, 16, dtype=dtype)
    exact, ours = outcome(model, x, autocast), outcome(twin, x, autocast)
    for name, value in exact.items():
        assert torch.equal(ours[name], value), name


def test_each_output_is_computed_again_once(recomputations: list[Recomputation]) -> None:
    model = attached(Model(layers=3))
    outcome(model, torch.randn(2, 20, 16))
    assert len(recomputations) == len(set(map(id, recomputations))) == 3


def test_x_is_not_kept_and_the_norm_keeps_its_input_alone() -> None:
    """nn.LayerNorm keeps its input and two numbers a row; X goes and those numbers too."""
    model = Model(layers=3)
    twin = attached(copy.deepcopy(model))
    x = torch.randn(2, 20, 16, requires_grad=True)
    sizes = []
    for net in (model, twin):
        with saved_tensors() as saved:
            y = net(x)
        sizes.append(saved_bytes(saved, list(net.parameters())))
        del y
    assert sizes[0] - sizes[1] == 3 * (40 * 16 * 4 + 2 * 40 * 4)


def test_the_storage_of_x_is_freed() -> None:
    class Source(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            x, self.freed = tensor_with_finaliser((8, 4))
            return x.mul_(h)

    source, reader = Source(), nn.Linear(4, 4)
    h = torch.ones(8, 4, requires_grad=True)
    attach(source, [reader])
    y = reader(source(h))
    assert source.freed
    y.sum().backward()
    assert torch.allclose(reader.weight.grad, torch.ones(4, 8) @ tensor_with_finaliser((8, 4))[0])


def test_an_input_from_elsewhere_is_kept_and_one_changed_in_place_an_error(
    recomputations: list[Recomputation],
) -> None:
    norm, reader = nn.LayerNorm(4), nn.Linear(4, 4)
    attach(norm, [reader])
    h = torch.randn(8, 4, requires_grad=True)
    norm(h)
    x = torch.randn(8, 4)
    reader(x).sum().backward()
    assert torch.allclose(reader.weight.grad, torch.ones(4, 8) @ x)
    assert not recomputations
    x = norm(h)
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        reader(x)


@pytest.mark.parametrize("method", ["recompute", "sampled"])
def test_a_step_leaves_nothing_behind(method: str) -> None:
    """An RMSNorm in operations of its own keeps the output of one of them for its backward."""

    class RMSNorm(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)

    model = Model()
    for layer in model.layers:
        layer.norm = RMSNorm()
    pamm.convert(model, pamm.PammConfig(method), example=torch.randn(2, 20, 16))
    alive = []
    for _ in range(5):
        model(torch.randn(2, 20, 16)).square().sum().backward()
        gc.collect()
        alive.append(sum(type(each) is Tensor for each in gc.get_objects()))
    assert alive[-1] <= alive[1]


def test_backward_twice_through_one_graph() -> None:
    model = Model()
    twin = attached(copy.deepcopy(model))
    x = torch.randn(2, 20, 16, requires_grad=True)
    for net in (model, twin):
        y = net(x).square().sum()
        y.backward(retain_graph=True)
        y.backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_two_forwards_before_their_backwards() -> None:
    model = Model()
    twin = attached(copy.deepcopy(model))
    inputs = [torch.randn(2, 20, 16) for _ in range(2)]
    for net in (model, twin):
        sum(net(x).square().sum() for x in inputs).backward()  # type: ignore[union-attr]
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_in_eval_it_is_the_plain_module(
    context: object, recomputations: list[Recomputation]
) -> None:
    model = Model()
    twin = attached(copy.deepcopy(model))
    x = torch.randn(2, 20, 16)
    with context():  # type: ignore[operator]
        assert torch.equal(model(x), twin(x))
    model.eval()
    twin.eval()
    y = twin(x)
    assert torch.equal(model(x), y)
    y.sum().backward()
    assert not recomputations


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_recompute_from_their_own_norm(copied: object) -> None:
    model = attached(Model())
    outcome(model, torch.randn(2, 20, 16))
    twin = copied(model)  # type: ignore[operator]
    layer = twin.layers[0]
    assert layer.norm is not model.layers[0].norm
    x = torch.randn(2, 20, 16)
    ours, theirs = outcome(model, x), outcome(twin, x)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_detaching_restores_the_classes() -> None:
    model = Model()
    names, plain = list(model.state_dict()), repr(model)
    attached(model)
    assert list(model.state_dict()) == names
    assert isinstance(model.layers[0].norm, nn.LayerNorm)
    assert detach(model) == 6
    assert repr(model) == plain
    assert type(model.layers[0].norm) is nn.LayerNorm
    assert set(vars(model.layers[0].norm)) == set(vars(nn.LayerNorm(16)))


def test_frozen_readers_leave_the_norms_gradient_exact() -> None:
    model = Model()
    for layer in model.layers:
        for name in NAMES:
            getattr(layer.attention, name).weight.requires_grad_(False)
    twin = attached(copy.deepcopy(model))
    x = torch.randn(2, 20, 16)
    model(x).square().sum().backward()
    with pytest.warns(UserWarning, match="nothing to free"):
        y = twin(x)
    y.square().sum().backward()
    assert torch.equal(model.layers[0].norm.weight.grad, twin.layers[0].norm.weight.grad)


class TestThroughConvert:
    """The probe tells which module makes X."""

    CONFIG = pamm.PammConfig("recompute")
    X = torch.randn(2, 20, 16)

    def test_everything_is_exact_and_nothing_held(self) -> None:
        model = Model(dropout=0.3)
        twin = copy.deepcopy(model)
        report = pamm.convert(twin, self.CONFIG, example=self.X)
        assert [group.held_bytes(40) for group in report.converted] == [0, 0]
        assert "2 groups converted (recompute)" in str(report)
        exact, ours = outcome(model, self.X), outcome(twin, self.X)
        assert all(torch.equal(exact[name], ours[name]) for name in exact)

    def test_what_groups_hold_is_what_the_report_says(self) -> None:
        model = Model()
        report = pamm.convert(model, self.CONFIG, example=self.X)
        layers = group_layers(model)
        assert list(layers) == [group.name for group in report.converted]
        assert set(saved_bytes_of(model, layers, lambda: model(self.X)).values()) == {0}

    def test_it_is_taken_back(self) -> None:
        model = Model()
        plain, names = repr(model), list(model.state_dict())
        pamm.convert(model, self.CONFIG, example=self.X)
        assert "group=layers.0.attention.{q_proj,k_proj,v_proj}" in repr(model)
        assert list(model.state_dict()) == names
        with pytest.raises(pamm.NothingToConvertError, match="already converted"):
            pamm.convert(model, self.CONFIG, example=self.X)
        pamm.seek(model, 3)  # nothing to draw, and no error
        assert pamm.revert(model) == 6
        assert repr(model) == plain

    def test_beside_pamm_on_other_layers(self) -> None:
        model = Model()
        pamm.convert(model, include="layers.0.*", example=self.X)
        pamm.convert(model, self.CONFIG, include="layers.1.*", example=self.X)
        assert len(pamm_layers(model)) == 3
        assert pamm.revert(model) == 6

    @pytest.mark.parametrize(
        ("maker", "reason"),
        [
            (nn.Dropout(0.1), "norm, which makes X, draws random numbers"),
            (nn.Linear(16, 16), "norm, which makes X, multiplies matrices"),
            (nn.Identity(), "X is no module's output"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_not_cheap_or_random_is_refused(self, maker: nn.Module, reason: str) -> None:
        block = Block()
        block.norm = maker
        with pytest.raises(pamm.NothingToConvertError, match=f"{reason}.* in backward"):
            pamm.convert(block, self.CONFIG, example=self.X)

    def test_without_a_probe_it_is_refused(self) -> None:
        with pytest.raises(pamm.NothingToConvertError, match="give convert an example"):
            pamm.convert(Model(), self.CONFIG)

    def test_is_no_method_of_the_functional_layer(self) -> None:
        weight = torch.randn(4, 16, requires_grad=True)
        with pytest.raises(pamm.PammError, match=r"make X again.*pamm\.convert"):
            pamm.linear(self.X, weight, config=self.CONFIG, stream=pamm.Stream())
