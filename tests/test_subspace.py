"""The subspace method: unbiased, its kernels against their twins, its directions where X's are."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pamm
from pamm import PammConfig, Stream, ops, subspace
from pamm.analysis.memory import saved_bytes
from pamm.compressors import Subspace, compressor
from pamm.errors import PammError
from pamm.nn import groups
from tests.tolerances import relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = PammConfig(method="subspace")
NAMES = ("q_proj", "k_proj", "v_proj")


def low_rank(tokens: int, n: int, rank: int, noise: float = 0.0) -> Tensor:
    x = torch.randn(tokens, rank, device=DEVICE) @ torch.randn(rank, n, device=DEVICE)
    return x + noise * torch.randn(tokens, n, device=DEVICE)


def prepared(n: int, config: PammConfig = CONFIG) -> Subspace:
    method = compressor(config)
    assert isinstance(method, Subspace)
    method.prepare(n, DEVICE)
    return method


def attention(n: int = 32, m: int = 24, **config: Any) -> nn.ModuleDict:
    model = nn.ModuleDict({name: nn.Linear(n, m) for name in NAMES}).to(DEVICE)
    pamm.convert(model, PammConfig(method="subspace", **config))
    return model


@pytest.mark.parametrize("n", [1, 2, 5, 16, 64, 100, 512, 4096])
@pytest.mark.parametrize("ratio", [1e-3, 1 / 8, 3 / 8, 1.0])
def test_directions_are_a_third_each_in_whole_tiles(n: int, ratio: float) -> None:
    fine, coarse, fresh = subspace.directions(ratio, n)
    assert fine == coarse == fresh or (n < 3 and (fine, coarse, fresh) == (0, 0, 1))
    assert fine + coarse + fresh <= n
    assert fresh % 16 == 0 or fresh == max(1, n // 3)
    if 48 <= ratio * n <= n - 48:
        assert abs(fine + coarse + fresh - ratio * n) <= 24


def test_fresh_directions_are_orthogonal_to_the_carried() -> None:
    carried = torch.linalg.qr(torch.randn(40, 12, dtype=torch.float64))[0]
    q = subspace.basis(carried, torch.tensor([3, 17, 39]))
    assert torch.equal(q[:, :12], carried)
    assert (carried.T @ q[:, 12:]).abs().max() < 1e-14


def test_the_gradient_is_unbiased_over_draws() -> None:
    """All unit vectors in turn, each as often as the others: the mean is exact, rounding aside."""
    n, tokens = 24, 50
    carried = torch.linalg.qr(torch.randn(n, 12, dtype=torch.float64))[0]
    x = torch.randn(tokens, n, dtype=torch.float64)
    g = torch.randn(tokens, 7, dtype=torch.float64)
    total = torch.zeros(7, n, dtype=torch.float64)
    for start in range(0, n, 4):
        q = subspace.basis(carried, torch.arange(start, start + 4))
        weight = torch.ones(16, dtype=torch.float64)
        weight[12:] = n / 4
        total += (g.T @ (x @ q) * weight) @ q.T
    assert relative_error(total / 6, g.T @ x) < 1e-14


def test_what_the_method_gives_is_right_on_the_average() -> None:
    """Through the compressor, weights included; what is left is rounding."""
    n, tokens = 48, 4000
    method = prepared(n, PammConfig(method="subspace", ratio=1.0))
    turned = torch.linalg.qr(torch.randn(n, n, device=DEVICE))[0]  # so that all drawn have a part
    method.axes = turned[:, :32].contiguous()
    x = torch.randn(tokens, n, device=DEVICE)
    g = x @ torch.randn(n, 7, device=DEVICE)  # so that no part of the gradient is mere noise
    total = torch.zeros(7, n, device=DEVICE)
    for start in range(0, n, 16):
        drawn = torch.arange(start, start + 16, device=DEVICE)
        total += method.weight_grad(method.compress(x, lambda *_, drawn=drawn: drawn), g)
    mean, exact = total / 3 @ turned, g.T @ x @ turned
    for columns in (slice(0, 16), slice(16, 32), slice(32, 48)):  # 4 bits, 2 bits, drawn anew
        part = exact[:, columns]
        assert abs(float((mean[:, columns] * part).sum() / part.square().sum()) - 1) < 0.03


def test_scales_are_those_of_all_rows_though_a_sample_tells_them() -> None:
    """Sequences of 64 rows with a large first one: as often in the sample as among all."""
    z = torch.randn(16_384, 8, device=DEVICE)
    z[::64] *= 30
    true = z.square().mean(0).sqrt()
    assert ((subspace.column_rms(z) / true - 1).abs() < 0.5).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_the_sample_missed_is_not_lost(backend: str) -> None:
    z = torch.randn(4096, 96, device=DEVICE)
    z[:, [3, 70]] = 0
    z[1, [3, 70]] = 5.0
    assert subspace.stride(4096, subspace.SAMPLE // 4) > 1
    codes, size, scale = ops.encode(z, 48, backend)
    value = ops.decode(codes, size, 48, 96, backend) * scale
    assert (value[1, [3, 70]] > 0.05).all()
    assert (value[2:, [3, 70]].abs() < 0.05).all()


def test_rounding_is_right_on_the_average_and_fine_where_it_should_be() -> None:
    """For normal numbers, rare tokens that are ten times as large included."""
    z = torch.randn(20_000, 96, device=DEVICE, dtype=torch.float64)
    z[::50] *= 10
    codes, size, scale = ops.encode(z, 48, "auto")
    value = ops.decode(codes, size, 48, 96, "auto") * scale
    for rows in (slice(0, None, 50), slice(1, None, 50)):
        for columns, noise in ((slice(0, 48), 0.014), (slice(48, 96), 0.135)):
            part, other = z[rows, columns], value[rows, columns]
            slope = float((part * other).sum() / part.square().sum())
            assert abs(slope - 1) < 0.02
            assert relative_error(other, part) ** 2 < 1.15 * noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    tokens=st.integers(0, 100),
    k=st.integers(1, 70),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    zeros=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_kernels_equal_their_twins(
    dtype: torch.dtype, tokens: int, k: int, scale: float, zeros: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    z = (scale * torch.randn(tokens, k, device=DEVICE)).to(dtype)
    if zeros:
        z[:, 0] = 0
        z[:1] = 0
    fine = seed % (k + 1)
    codes, size, scales = ops.encode(z, fine, "triton")
    again = ops.encode(z, fine, "triton")
    assert all(torch.equal(*pair) for pair in zip((codes, size, scales), again, strict=True))
    slow = subspace.encode(z, fine)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(scales, slow[2], rtol=1e-6, atol=0)
    torch.testing.assert_close(size, slow[1], rtol=2 * unit, atol=0)
    values = ops.decode(codes, size, fine, k, "triton")
    assert values.dtype == dtype
    torch.testing.assert_close(values, subspace.decode(codes, size, fine, k), rtol=unit, atol=0)
    # Each value is the level next to z, but for what fp32 decides where two are as near.
    for part, code in ((slice(0, fine), subspace.FINE), (slice(fine, k), subspace.COARSE)):
        step = size[:, 0 if code is subspace.FINE else 1, None].float()
        target = torch.where(scales == 0, 0, z.float() / scales)[:, part] * code.gain
        last = step * (code.levels - 1) / 2
        off = (values[:, part].float() - target.clamp(-last, last)).abs()
        assert (off <= step * (0.5 + code.levels * unit)).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy, in Triton's interpreter
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_gradient(backend: str, value: float) -> None:
    x, g = torch.randn(64, 32, device=DEVICE), torch.randn(64, 8, device=DEVICE)
    for place in (x, g):
        method = prepared(32, PammConfig(method="subspace", backend=backend))
        kept = place[5, 7].clone()
        place[5, 7] = value
        method.advance(x)
        state = method.compress(x, Stream().draw)
        assert not method.weight_grad(state, g).isfinite().all()
        assert method.axes.isfinite().all()
        place[5, 7] = kept


def test_directions_turn_to_where_the_energy_is() -> None:
    x = low_rank(500, 64, rank=8, noise=0.01)
    method = prepared(64)
    for _ in range(subspace.FIRST):
        method.advance(x)
    q = method.axes
    assert torch.allclose(q.T @ q, torch.eye(q.shape[1], device=DEVICE), atol=1e-5)
    left = x - (x @ q) @ q.T
    assert left.norm() < 0.02 * x.norm()
    for _ in range(200):
        q = subspace.refreshed(q, x)
    energy = (x @ q).square().sum(0)[:8]
    assert (energy[:-1] > energy[1:]).all()
    state = method.compress(x, Stream().draw)
    g = torch.randn(500, 5, device=DEVICE)
    # Rounding: 4 bits of the first third, 2 of what the others hold.
    assert relative_error(method.weight_grad(state, g), g.T @ x) < 0.2


@pytest.mark.parametrize("x", [torch.zeros(20, 32), torch.ones(1, 32), torch.zeros(0, 32)])
def test_degenerate_inputs_leave_an_orthonormal_basis(x: Tensor) -> None:
    method = prepared(32)
    for _ in range(3):
        method.advance(x.to(DEVICE))
    q = method.axes
    assert torch.allclose(q.T @ q, torch.eye(q.shape[1], device=DEVICE), atol=1e-5)
    state = method.compress(x.to(DEVICE), Stream().draw)
    gradient = method.weight_grad(state, torch.ones(len(x), 3, device=DEVICE))
    assert gradient.shape == (3, 32)
    assert gradient.isfinite().all()


def test_refreshes_come_often_at_first_and_seldom_later() -> None:
    method = prepared(32)
    changed = []
    for number in range(2 * subspace.EVERY + 1):
        before = method.axes.clone()
        method.advance(torch.randn(100, 32, device=DEVICE))
        if not torch.equal(before, method.axes):
            changed.append(number)
    assert changed == [*range(subspace.FIRST), subspace.EVERY, 2 * subspace.EVERY]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_group_shares_one_state_and_holds_what_is_predicted(dtype: torch.dtype) -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 24) for name in NAMES}).to(DEVICE, dtype)
    report = pamm.convert(model, CONFIG)
    x = torch.randn(3000, 64, device=DEVICE, dtype=dtype, requires_grad=True)
    held = saved_bytes(model, {"": list(NAMES)}, lambda: [layer(x) for layer in model.values()])
    assert held[""] == report.held_bytes(3000)
    assert held[""] < 0.2 * report.exact_bytes(3000)


def test_forward_and_other_gradients_are_exact() -> None:
    model = attention()
    plain = copy.deepcopy(model)
    pamm.revert(plain)
    x = torch.randn(3, 40, 32, device=DEVICE)
    grads = []
    for target in (model, plain):
        rows = x.clone().requires_grad_()
        outputs = [layer(rows) for layer in target.values()]
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        grads.append((rows.grad, *outputs, *(layer.bias.grad for layer in target.values())))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    for one, other in zip(model.values(), plain.values(), strict=True):
        assert not torch.equal(one.weight.grad, other.weight.grad)
        assert relative_error(one.weight.grad, other.weight.grad) < 3


def test_two_forward_passes_before_their_backward() -> None:
    """What the first pass saved must not change in the second, also if Q1 does."""
    x = torch.randn(2, 100, 32, device=DEVICE)
    both, alone = attention(), attention()
    alone.load_state_dict(both.state_dict())
    first, _ = both["q_proj"](x[0]), both["q_proj"](x[1])
    first.sum().backward()
    alone["q_proj"](x[0]).sum().backward()
    assert torch.equal(both["q_proj"].weight.grad, alone["q_proj"].weight.grad)


def test_copies_carry_directions_of_their_own() -> None:
    model = attention()
    twin = copy.deepcopy(model)
    twin["q_proj"](torch.randn(50, 32, device=DEVICE))
    ours, theirs = (groups(m)[0].method for m in (model, twin))
    assert isinstance(ours, Subspace)
    assert isinstance(theirs, Subspace)
    assert not torch.equal(ours.axes, theirs.axes)
    assert int(ours.passes) == 0


def test_state_of_the_method_is_not_in_the_state_dict() -> None:
    assert set(attention().state_dict()) == {f"{n}.{p}" for n in NAMES for p in ("weight", "bias")}


def test_a_function_cannot_carry() -> None:
    x, weight = torch.randn(4, 32), torch.randn(8, 32, requires_grad=True)
    with pytest.raises(PammError, match=r"carries directions.*convert"):
        pamm.linear(x, weight, config=CONFIG, stream=Stream())


def test_the_default_ratio_is_three_eighths_of_the_features() -> None:
    assert CONFIG.ratio == 3 / 8
    assert PammConfig.from_dict(CONFIG.to_dict()) == CONFIG


def test_directions_of_another_ratio_or_other_layers_are_refused() -> None:
    model = attention()
    tensors = pamm.carried(model)
    name = next(each for each in tensors if each.endswith(".axes"))
    before = {each: tensor.clone() for each, tensor in tensors.items()}
    for wrong in ({name: tensors[name][:, 1:] + 1}, {"other.axes": tensors[name]}):
        with pytest.raises(pamm.PammError, match=r"axes is .* where it was saved and .* here"):
            pamm.restore_carried(model, {**tensors, **wrong})
    with pytest.raises(pamm.PammError, match="missing where it was saved"):
        pamm.restore_carried(model, {})
    assert all(torch.equal(tensor, before[each]) for each, tensor in tensors.items())


def test_a_resumed_run_gets_its_directions_back() -> None:
    x = torch.randn(3, 200, 32, device=DEVICE)
    one, other = attention(), attention()
    other.load_state_dict(one.state_dict())
    for rows in x[:2]:
        one["q_proj"](rows)
    pamm.restore_carried(other, pamm.carried(one))
    grads = []
    for model in (one, other):
        pamm.seek(model, 2)
        model["q_proj"](x[2]).sum().backward()
        grads.append(model["q_proj"].weight.grad)
    assert torch.equal(*grads)


def test_a_copy_in_shared_memory_learns_by_itself() -> None:
    method = compressor(PammConfig("subspace"))
    method.prepare(48, torch.device("cpu"))
    # What torch.multiprocessing does with the arguments of a process.
    other = pickle.loads(ForkingPickler.dumps(method))
    other.advance(torch.randn(64, 48))
    axes, learned = method.carried()["axes"], other.carried()["axes"]
    assert torch.equal(axes, torch.eye(*axes.shape))
    assert not torch.equal(axes, learned)
    assert [int(each.carried()["passes"]) for each in (method, other)] == [0, 1]
