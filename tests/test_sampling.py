"""Tokens drawn in backward by the size of their gradients."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import pamm
from pamm import ops, sampling
from pamm.compressors import compressor
from pamm.kernels import sample as kernel
from pamm.nn import groups
from pamm.stream import Stream
from tests.helpers import Model
from tests.tolerances import assert_implementation_error, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = pamm.PammConfig("sampled", ratio=1 / 4)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SHAPES = pytest.mark.parametrize(
    ("tokens", "n", "m", "k"), [(1, 4, 3, 1), (90, 6, 8, 0), (300, 40, 150, 10), (1500, 300, 7, 75)]
)


def sampled(
    x: Tensor, g: Tensor, c: int, offset: Tensor, backend: str = "auto", k: int = 2
) -> Tensor:
    x, g = x.to(DEVICE), g.to(DEVICE)
    whole = sampling.whole(x, directions(x.shape[1], k).to(x), g) if k else None
    size, offset = sampling.sizes(g), offset.double().to(DEVICE)
    x_rows, g_rows = ops.sample(x, g, size, c, offset, whole, backend)
    return (g_rows.T @ x_rows)[: g.shape[1], : x.shape[1]]


def directions(n: int, k: int) -> Tensor:
    """Orthogonal ones that have nothing to do with X, as long as ``sampling`` wants them."""
    generator = torch.Generator().manual_seed(n)
    q = torch.linalg.qr(torch.randn(n, k, generator=generator).double())[0]
    return (q * sampling.unit(n)).to(DEVICE)


def laid_otherwise(dtype: torch.dtype, tokens: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """X column by column, and G with rows that are further apart than they are long."""
    x = torch.randn(n, tokens, device=DEVICE).to(dtype).T
    return x, torch.randn(tokens, m + 1, device=DEVICE).to(dtype)[:, 1:]


def uneven(tokens: int) -> Tensor:
    """Sizes of which few have most of the sum."""
    return torch.randn(tokens, dtype=torch.float64).abs() ** 4


@pytest.mark.parametrize("c", [1, 10, 250, 900])
def test_shares_add_up_and_follow_the_size(c: int) -> None:
    size = uneven(1000)
    q = sampling.shares(size, c)
    assert q.max() <= 1
    assert (q[size.argsort()].diff() >= 0).all()
    assert 0.98 * c < float(q.sum()) < 1.001 * c


def test_shares_of_nothing_are_even() -> None:
    q = sampling.shares(torch.zeros(8), 2)
    assert torch.allclose(q, torch.full((8,), 0.25))


@pytest.mark.parametrize("c", [50, 250])
def test_a_draw_is_right_on_the_average_for_every_token(c: int) -> None:
    q, times = sampling.shares(uneven(500), c), 1000
    total = torch.zeros(500, dtype=torch.float64)
    for number in range(times):
        index, weight = sampling.drawn(q, c, torch.tensor([(number + 0.5) / times]))
        assert len(index) == c
        total.index_add_(0, index, weight)
    often = q > 0.05
    assert torch.allclose(total[often] / times, torch.ones_like(total[often]), rtol=0.03)
    assert float(total.sum()) / times == pytest.approx(500, rel=0.01)


@pytest.mark.parametrize("k", [0, 3])
def test_the_mean_of_many_gradients_is_the_exact_one_and_noise_is_least_by_size(k: int) -> None:
    x, g = torch.randn(512, 12), torch.randn(512, 7) * uneven(512)[:, None].float()
    x, g = x.to(DEVICE), g.to(DEVICE)
    exact, times = g.T @ x, 400
    offsets = (torch.arange(times)[:, None] + torch.rand(times, 1)) / times
    made = [sampled(x, g, 128, offset, k=k) for offset in offsets]
    assert relative_error(torch.stack(made).mean(0), exact) < 0.02
    by_size = sum(relative_error(one, exact) ** 2 for one in made) / times
    even = 0.0
    for _ in range(times):
        index = torch.randperm(512)[:128]
        even += relative_error(4 * g[index].T @ x[index], exact) ** 2 / times
    assert by_size < even / 8


def test_what_lies_in_the_directions_has_no_noise() -> None:
    x, g = torch.randn(512, 12, dtype=torch.float64), torch.randn(512, 7, dtype=torch.float64)
    basis = directions(12, 3).cpu() / sampling.unit(12)
    inside = x @ basis @ basis.T
    offset = torch.tensor([0.4])
    made = sampled(inside, g, 16, offset, k=3).cpu()
    assert relative_error(made, g.T @ inside) < 1e-12
    made = sampled(10 * inside + x, g, 128, offset, k=3).cpu()
    plain = sampled(10 * inside + x, g, 128, offset, k=0).cpu()
    truth = g.T @ (10 * inside + x)
    assert relative_error(made, truth) < relative_error(plain, truth) / 4


def test_directions_turn_to_where_x_is_and_the_noise_falls() -> None:
    spread = torch.logspace(-2, 0, 32)  # not in the first features, where directions begin
    x, g = torch.randn(600, 32) * spread, torch.randn(600, 5)
    errors = {}
    for most in (0, 8):
        method = compressor(pamm.PammConfig("sampled", ratio=1 / 4, directions=most))
        method.prepare(32, x.device)
        stream = pamm.Stream()
        for _ in range(8):
            method.advance(x)
        made = [method.weight_grad((*method.compress(x, stream.draw), x), g) for _ in range(20)]
        errors[most] = sum(relative_error(each, g.T @ x) for each in made) / 20
    assert errors[8] < errors[0] / 3
    assert set(method.carried()) == {"axes", "passes"}


def test_all_tokens_give_the_exact_gradient() -> None:
    x, g = torch.randn(20, 6), torch.randn(20, 5)
    method = compressor(pamm.PammConfig("sampled", ratio=1.0))
    assert torch.equal(method.weight_grad((torch.zeros(1), x), g), g.T @ x)


@pytest.mark.parametrize(("most", "is_exact"), [(7, False), (8, True)])
def test_rows_no_fewer_than_tokens_give_the_exact_gradient(most: int, is_exact: bool) -> None:
    x, g = torch.randn(16, 40), torch.randn(16, 50)
    method = compressor(pamm.PammConfig("sampled", ratio=1 / 2, directions=most))
    method.prepare(40, torch.device("cpu"))
    made = method.weight_grad((*method.compress(x, Stream().draw), x), g)
    assert torch.equal(made, g.T @ x) == is_exact


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of the interpreter
def test_what_overflowed_stays_visible(bad: float, backend: str) -> None:
    """Loss scaling looks for it."""
    x, g = torch.randn(64, 6), torch.randn(64, 5)
    g[3, 2] = bad
    assert not sampled(x, g, 16, torch.tensor([0.3]), backend).isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_gradient_gives_none(backend: str) -> None:
    x, g = torch.randn(64, 6), torch.zeros(64, 5)
    made = sampled(x, g, 16, torch.tensor([0.3]), backend)
    assert torch.equal(made, torch.zeros(5, 6, device=DEVICE))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_small_numbers_of_fp16_do_not_overflow(backend: str) -> None:
    x, g = 0.1 * torch.randn(64, 6).half(), torch.full((64, 5), 1e-3)
    g[0] = 60000.0
    assert sampled(x, g.half(), 16, torch.tensor([0.3]), backend).isfinite().all()


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "m", "c"), [(1, 3, 1), (7, 5, 3), (300, 40, 75), (4200, 8, 1500), (9000, 4, 2500)]
)
def test_the_draw_equals_its_twin(dtype: torch.dtype, tokens: int, m: int, c: int) -> None:
    """Sizes that are powers of two, of which all sums are exact: the same draws to the last one."""
    g = torch.zeros(tokens, m, device=DEVICE)
    g[:, 0] = 2.0 ** torch.randint(-6, 3, (tokens,), device=DEVICE)
    g[::5] = 0
    g = g.to(dtype)[:, : m - 1]  # not contiguous
    size = sampling.sizes(g)
    for offset in (0.0, 0.37, 0.999):
        at = torch.tensor([offset], dtype=torch.float64, device=DEVICE)
        index, weight = kernel.draw(size, c, at)
        expected = sampling.draw(size, c, at)
        assert (index == expected[0]).float().mean() > 0.999  # the mean may be off in a last bit
        torch.testing.assert_close(weight, expected[1], rtol=1e-4, atol=0)
        assert (index.diff() >= 0).all()
    again = kernel.draw(size, c, at)
    assert torch.equal(index, again[0])
    assert torch.equal(weight, again[1])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_large_inputs_in_fp16_do_not_overflow_however_rare_the_draw(backend: str) -> None:
    """Weights are large where gradients are small: they meet on G's side."""
    size = torch.exp(3 * torch.randn(2048, 1, device=DEVICE)).clamp(max=20)
    x = torch.full((2048, 8), 150.0, device=DEVICE).half()
    g = (1e-3 * size * torch.randn(2048, 8, device=DEVICE)).half()
    for start in range(20):
        offset = torch.tensor([start / 20], dtype=torch.float64, device=DEVICE)
        x_rows, g_rows = ops.sample(x, g, sampling.sizes(g), 32, offset, None, backend)
        assert x_rows.isfinite().all()
        assert g_rows.isfinite().all()


def test_draws_begin_in_steps_finer_than_the_share_of_any_token() -> None:
    """Else some tokens of a few are never drawn, and others too often."""
    method, stream = compressor(pamm.PammConfig("sampled", 1 / 4)), Stream(0)
    method.prepare(4, torch.device("cpu"))
    x = torch.zeros(32, 4)
    offsets = torch.cat([method.compress(x, stream.draw)[0] for _ in range(500)])
    assert len(offsets.unique()) > 490
    assert offsets.min() >= 0
    assert offsets.max() < 1
    assert abs(offsets.mean() - 1 / 2) < 0.05


@DTYPES
@SHAPES
def test_the_rows_equal_their_twins(
    dtype: torch.dtype, tokens: int, n: int, m: int, k: int
) -> None:
    x, g = laid_otherwise(dtype, tokens, n, m)
    basis = directions(n, k).to(dtype)
    c = max(1, tokens // 3)
    index = torch.randint(tokens, (c,), device=DEVICE)
    weight = 1 + torch.rand(c, device=DEVICE)
    whole = sampling.whole(x, basis, g) if k else None
    if whole:  # a compiler may lay its rows further apart
        whole = whole._replace(inner=torch.nn.functional.pad(whole.inner, (0, 3))[:, :-3])
    made = kernel.rows(x, g, index, weight, whole)
    same = sampling.rows(x, g, index, weight, whole)
    wide = sampling.Whole(*(each.double() for each in whole)) if whole else None
    truth = sampling.rows(x.double(), g.double(), index, weight.double(), wide)
    for ours, plain, right in zip(made, same, truth, strict=True):
        assert torch.equal(ours[c:], plain[c:])
        assert_implementation_error(ours, plain, right)
    for ours, plain in zip(made, same, strict=True):
        assert ours.dtype == plain.dtype == dtype
        assert ours.shape == plain.shape
        assert ours.shape[1] % 64 == 0
        assert ours.is_contiguous()
    again = kernel.rows(x, g, index, weight, whole)
    assert all(torch.equal(one, two) for one, two in zip(made, again, strict=True))


class TestThroughConvert:
    X = torch.randn(2, 60, 16)

    def gradients(self, model: Model) -> dict[str, Tensor]:
        model.zero_grad()
        model(self.X).square().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def test_only_the_projections_gradients_are_approximate(self) -> None:
        model = Model()
        twin = copy.deepcopy(model)
        report = pamm.convert(twin, CONFIG, example=self.X)
        assert "not in 8 bits" in str(
            dataclasses.replace(report, config=dataclasses.replace(CONFIG, fp8=False))
        )
        assert "2 groups converted (sampled, ratio 1/4, in 8 bits where the GPU can)" in str(report)
        assert [group.held_bytes(120) for group in report.converted] == [8, 8]
        exact, ours = self.gradients(model), self.gradients(twin)
        for name in exact:
            converted = any(f"{each}_proj.weight" in name for each in "qkv")
            assert torch.equal(exact[name], ours[name]) != converted, name

    def test_directions_are_held_and_carried(self) -> None:
        model = Model()
        config = pamm.PammConfig("sampled", ratio=1 / 4, directions=64)
        report = pamm.convert(model, config, example=self.X)
        title = " ".join(str(report).split())
        assert "(sampled, ratio 1/4, 4 directions (of 64: a quarter of X's features at" in title
        for group, converted in zip(groups(model), report.converted, strict=True):
            state = group.method.compress(self.X[0], group.stream.draw)
            assert converted.held_bytes(60) == sum(t.nbytes for t in state) == 8 + 4 * 16 * 4
        self.gradients(model)
        assert len(pamm.carried(model)) == 4
        assert [int(group.method.carried()["passes"]) for group in groups(model)] == [1, 1]

    def test_draws_differ_and_come_back_with_what_was_carried(self) -> None:
        model = Model()
        config = pamm.PammConfig("sampled", ratio=1 / 4, directions=4)
        pamm.convert(model, config, example=self.X)
        name = "layers.0.attention.q_proj.weight"
        made = []
        first = {name: tensor.clone() for name, tensor in pamm.carried(model).items()}
        for step in (0, 1, 0):
            pamm.seek(model, step)
            pamm.restore_carried(model, first)
            made.append(self.gradients(model)[name])
        assert not torch.equal(made[0], made[1])
        assert torch.equal(made[0], made[2])

    @pytest.mark.parametrize("frozen", [[], ["k_proj"]])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_x_is_gone_after_forward(self, frozen: list[str], dtype: torch.dtype) -> None:
        model = Model()
        pamm.convert(model, CONFIG, example=self.X)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(each in name for each in frozen))
        seen = []
        block: Any = model.layers[1]
        block.norm.register_forward_hook(
            lambda *made: seen.append(made[-1].untyped_storage()._weak_ref())
        )
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = model(self.X)
        assert [torch.UntypedStorage._expired(ref) for ref in seen] == [True]
        out.float().sum().backward()
        assert all(not group._currents.of for group in groups(model))

    def test_it_is_taken_back(self) -> None:
        model = Model()
        plain = repr(model)
        pamm.convert(model, CONFIG, example=self.X)
        assert "recomputed" in repr(model)
        with pytest.raises(pamm.NothingToConvertError, match="already converted"):
            pamm.convert(model, CONFIG, example=self.X)
        assert pamm.revert(model) == 6
        assert repr(model) == plain

    def test_backward_takes_x_from_one_recomputation_and_no_copy_of_it(self) -> None:
        model = Model()
        pamm.convert(model, CONFIG, example=self.X)
        nodes, seen = [model(self.X.clone().requires_grad_()).grad_fn], {}
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen[node] = node.name()
                nodes += [each for each, _ in node.next_functions]
        readers = [node for node, name in seen.items() if name == "CompressedLinearBackward"]
        assert len(readers) == 6
        assert len({node.saved_tensors[-1].data_ptr() for node in readers}) == 2  # two blocks

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_draw_and_recompute_by_themselves(self, copied: Any) -> None:
        model = Model()
        pamm.convert(model, CONFIG, example=self.X)
        twin = copied(model)
        pamm.revert(model)
        assert len(groups(twin)) == 2
        assert self.gradients(twin)

    def test_without_what_makes_x_it_is_refused(self) -> None:
        advice = r'give convert an example.*PammConfig\("subspace"\)'
        with pytest.raises(pamm.NothingToConvertError, match=advice):
            pamm.convert(Model(), CONFIG)
        weight = torch.randn(4, 16, requires_grad=True)
        with pytest.raises(pamm.PammError, match=r"pamm\.convert"):
            pamm.linear(self.X, weight, config=CONFIG, stream=pamm.Stream())
