"""Drawn rows multiplied in 8 bits."""

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pamm
from pamm import fp8, ops, sampling
from pamm.compressors import compressor
from pamm.kernels import fp8 as kernel
from pamm.kernels import sample
from pamm.stream import Stream
from tests.test_sampling import DEVICE, DTYPES, SHAPES, directions, laid_otherwise, uneven
from tests.tolerances import assert_implementation_error, relative_error

OFFSET = torch.tensor([0.37], dtype=torch.float64, device=DEVICE)
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


def gradient(
    x: Tensor, g: Tensor, c: int, backend: str, k: int = 0, offset: Tensor = OFFSET
) -> Tensor:
    whole = sampling.whole(x, directions(x.shape[1], k).to(x), g) if k else None
    size, most = sampling.sizes(g), fp8.largest(x)
    return ops.sample_fp8(x, g, size, most, c, offset.to(DEVICE), whole, backend)


def matrices(
    tokens: int, n: int, m: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """X, and a G of which few tokens have most."""
    x, g = torch.randn(tokens, n), torch.randn(tokens, m) * uneven(tokens).float()[:, None]
    return x.to(DEVICE, dtype), g.to(DEVICE, dtype)


@BACKENDS
@pytest.mark.parametrize("k", [0, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_adds_little_to_the_noise_of_the_draw(
    backend: str, k: int, dtype: torch.dtype
) -> None:
    x, g = matrices(600, 72, 80, dtype)
    whole = sampling.whole(x, directions(72, k).to(x), g) if k else None
    x_rows, g_rows = ops.sample(x, g, sampling.sizes(g), 75, OFFSET, whole, backend)
    drawn = (g_rows.double().T @ x_rows.double())[:80, :72]
    rounded = relative_error(gradient(x, g, 75, backend, k), drawn)
    assert rounded < 0.05
    assert rounded < relative_error(drawn, g.double().T @ x.double()) / 2


@BACKENDS
def test_long_sums_of_one_sign_are_not_cut_short(backend: str) -> None:
    """Tensor cores add in fewer bits than fp32 has."""
    x, g = torch.rand(9000, 64, device=DEVICE).bfloat16(), torch.rand(9000, 64, device=DEVICE)
    made = gradient(x, g.bfloat16(), 8000, backend).double()
    truth = g.bfloat16().double().T @ x.double()
    assert abs(float((made / truth).mean()) - 1) < 0.01


@BACKENDS
def test_the_mean_of_many_gradients_is_the_exact_one_but_for_rounding(backend: str) -> None:
    x, g = matrices(256, 24, 32)
    times = 20
    offsets = (torch.arange(times)[:, None] + torch.rand(times, 1, dtype=torch.float64)) / times
    made = [gradient(x, g, 64, backend, offset=offset).double() for offset in offsets]
    exact = g.double().T @ x.double()
    assert sum(relative_error(one, exact) for one in made) / times > 0.1
    # A row is rounded in the same way whenever it is drawn.
    assert relative_error(torch.stack(made).mean(0), exact) < 0.05


@DTYPES
@SHAPES
def test_the_rows_equal_their_twins(
    dtype: torch.dtype, tokens: int, n: int, m: int, k: int
) -> None:
    x, g = laid_otherwise(dtype, tokens, n, m)
    whole = sampling.whole(x, directions(n, k).to(dtype), g) if k else None
    c = max(1, tokens // 3)
    size, most = sampling.sizes(g), fp8.largest(x)
    index, weight, units = sample.draw_with_units(size, c, OFFSET, most)
    expected = fp8.units(size, most, c)
    torch.testing.assert_close(units, expected)
    assert units.stride() == expected.stride() == (4,)  # cuBLAS takes 16 bytes apart
    made = kernel.rows(x, g, index, weight, units, whole)
    plain = fp8.rows(x, g, index, weight, units, whole)
    wide = sampling.Whole(*(each.double() for each in whole)) if whole else None
    x_truth, g_truth = sampling.rows(x.double(), g.double(), index, weight.double(), wide)
    for ours, same, truth, unit in zip(made, plain, (x_truth, g_truth), units, strict=False):
        assert ours.dtype == same.dtype == torch.float8_e4m3fn
        assert ours.shape == same.shape == (truth.shape[1], fp8.padded(c))
        assert ours.is_contiguous()
        assert same.is_contiguous()
        ours, same = ours.float() * unit, same.float() * unit
        assert_implementation_error(ours[:, :c], same[:, :c], truth[:c].T)
        assert not ours[:, c:].any()
        assert not same[:, c:].any()
    again = kernel.rows(x, g, index, weight, units, whole)
    assert torch.equal(made.x.float(), again.x.float())
    assert torch.equal(made.g.float(), again.g.float())


def test_the_units_do_not_change_a_draw() -> None:
    size = uneven(3000).float().to(DEVICE)
    index, weight, _ = sample.draw_with_units(size, 700, OFFSET, size)
    expected = sample.draw(size, 700, OFFSET)
    assert torch.equal(index, expected[0])
    assert torch.equal(weight, expected[1])


@BACKENDS
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_nothing_is_beyond_reach(backend: str, spread: float) -> None:
    """Rows and weights of all sizes: alike, and with one that has nearly all."""
    size = torch.exp(spread * torch.randn(512, 1, device=DEVICE))
    x = (torch.randn(512, 32, device=DEVICE) * size.flip(0)).bfloat16()
    g = (1e-6 * size * torch.randn(512, 48, device=DEVICE)).bfloat16()
    for c in (3, 128, 500):
        sizes, most = sampling.sizes(g), fp8.largest(x)
        index, weight = sampling.draw(sizes, c, OFFSET)
        units = fp8.units(sizes, most, c)
        longest = (weight * sizes[index]).max()
        assert longest <= units[1] * fp8.LARGEST
        assert longest >= units[1] * fp8.LARGEST / 10  # nor is reach given away
        drawn = g[index].double() * weight.double()[:, None]
        made = gradient(x, g, c, backend)
        assert relative_error(made, drawn.T @ x[index].double()) < 0.1


@BACKENDS
def test_one_token_with_most_of_it_leaves_the_others_theirs(backend: str) -> None:
    """It sets the unit: the others have what is left of e4m3's reach."""
    x, g = torch.randn(2000, 64, device=DEVICE), torch.randn(2000, 64, device=DEVICE)
    g[0] *= 0.1 * 2000
    x[0] = 0  # so that the product is the others'
    x, g = x.bfloat16(), g.bfloat16()
    index, weight = sampling.draw(sampling.sizes(g), 1400, OFFSET)
    drawn = (g[index].double() * weight.double()[:, None]).T @ x[index].double()
    assert relative_error(gradient(x, g, 1400, backend), drawn) < 0.06


@BACKENDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["x", "g"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter
def test_what_overflowed_stays_visible(
    bad: float, backend: str, place: str, dtype: torch.dtype
) -> None:
    """Loss scaling looks for it: in any token, drawn or not."""
    x, g = matrices(64, 6, 5, dtype)
    for token in (sampling.sizes(g).argmax(), sampling.sizes(g).argmin()):
        spoilt = {"x": x.clone(), "g": g.clone()}
        spoilt[place][token, 2] = bad
        assert not gradient(spoilt["x"], spoilt["g"], 20, backend).isfinite().all()


@BACKENDS
def test_no_gradient_gives_none(backend: str) -> None:
    x, g = torch.randn(64, 6, device=DEVICE), torch.zeros(64, 5, device=DEVICE)
    for features in (x, torch.zeros_like(x)):
        made = gradient(features.bfloat16(), g.bfloat16(), 16, backend)
        assert torch.equal(made, torch.zeros(5, 6, device=DEVICE).bfloat16())


@pytest.mark.parametrize(
    ("capability", "dtype", "served"),
    [
        ((9, 0), torch.bfloat16, True),
        ((8, 9), torch.float16, True),
        ((12, 0), torch.bfloat16, True),
        ((8, 6), torch.bfloat16, False),
        ((9, 0), torch.float32, False),
    ],
)
def test_where_it_is_served(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, served: bool
) -> None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert fp8.is_served(torch.device("cuda"), dtype) == served
    assert not fp8.is_served(torch.device("cpu"), dtype)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not fp8.is_served(torch.device("cuda"), dtype)


@pytest.mark.parametrize(
    ("raised", "seen", "says"),
    [
        (RuntimeError("NOT_SUPPORTED"), pamm.PammError, r"\(NOT_SUPPORTED\).*fp8=False"),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
    ],
    ids=("cannot", "no room"),
)
def test_a_gpu_that_cannot_after_all_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, seen: type[Exception], says: str
) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise raised

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuse)
    x = SimpleNamespace(is_cuda=True, T=None)
    rows: Any = SimpleNamespace(x=x, g=None, units=torch.ones(2))
    with pytest.raises(seen, match=says):
        inspect.unwrap(fp8.product)(rows, torch.bfloat16)


def test_sums_are_in_fp32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs otherwise is seen by ``test_long_sums_of_one_sign_are_not_cut_short`` there."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda *_, **how: asked.update(how))
    x = SimpleNamespace(is_cuda=True, T=None)
    inspect.unwrap(fp8.product)(SimpleNamespace(x=x, g=None, units=torch.ones(2)), torch.bfloat16)
    assert asked["use_fast_accum"] is False


@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize("k", [0, 4])
def test_the_method_uses_it_where_it_is_served(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None, k: int
) -> None:
    x, g = matrices(64, 24, 32)
    method = compressor(pamm.PammConfig("sampled", 1 / 2, directions=k, fp8=wanted))
    method.prepare(24, DEVICE)
    state = method.compress(x, Stream().draw)
    monkeypatch.setattr(fp8, "is_served", lambda *_: False)
    plain = method.weight_grad((*state, x), g)
    monkeypatch.setattr(fp8, "is_served", lambda *_: True)
    made = method.weight_grad((*state, x), g)
    assert made.dtype == g.dtype
    assert torch.equal(made, plain) == (wanted is False)
    assert relative_error(made, plain) < 0.05


@BACKENDS
@pytest.mark.parametrize("k", [0, 4])
def test_of_all_tokens_none_is_drawn_and_the_gradient_is_exact_but_for_rounding(
    monkeypatch: pytest.MonkeyPatch, backend: str, k: int
) -> None:
    x, g = matrices(300, 24, 30)
    wide, rounded = (
        compressor(pamm.PammConfig("sampled", 1, directions=k, fp8=on, backend=backend))
        for on in (False, True)
    )
    rounded.prepare(24, DEVICE)
    state = (*rounded.compress(x, Stream().draw), x)
    monkeypatch.setattr(fp8, "is_served", lambda *_: False)
    assert torch.equal(rounded.weight_grad(state, g), g.T @ x)
    monkeypatch.setattr(fp8, "is_served", lambda *_: True)
    assert torch.equal(wide.weight_grad(state, g), g.T @ x)
    made = rounded.weight_grad(state, g)
    assert 0 < relative_error(made, g.double().T @ x.double()) < 0.05
    other = (torch.full_like(state[0], 0.9), *state[1:])
    assert torch.equal(made, rounded.weight_grad(other, g)), "of the draw it knows nothing"
    bare = compressor(pamm.PammConfig("sampled", 1, backend=backend))
    assert torch.equal(made, bare.weight_grad((state[0], x), g)), "nor of directions"


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_a_few_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Two thirds of two are two."""
    monkeypatch.setattr(fp8, "is_served", lambda *_: True)
    x, g = torch.ones(tokens, 6).bfloat16(), torch.ones(tokens, 5).bfloat16()
    made = compressor(pamm.PammConfig()).weight_grad((torch.zeros(1).double(), x), g)
    torch.testing.assert_close(made, g.T @ x, rtol=0.1, atol=0)


def test_with_directions_as_many_rows_as_tokens_are_not_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fp8, "is_served", lambda *_: True)
    x, g = matrices(20, 16, 5)
    method = compressor(pamm.PammConfig("sampled", 4 / 5, directions=4))
    method.prepare(16, DEVICE)
    state = method.compress(x, Stream().draw)
    assert torch.equal(method.weight_grad((*state, x), g), g.T @ x)


def test_the_configuration_has_it() -> None:
    config, default = pamm.PammConfig("sampled", 1 / 4, fp8=False), pamm.PammConfig()
    assert pamm.PammConfig.from_dict(config.to_dict()) == config
    assert default.fp8 is True
    assert default == pamm.PammConfig("sampled", fp8=True)
    other = dataclasses.replace(default, method="subspace")
    assert other.fp8 is None
    assert dataclasses.replace(other, method="sampled") == default
    with pytest.raises(pamm.PammError, match="give True or False"):
        pamm.PammConfig("sampled", fp8=1)  # type: ignore[arg-type]
    with pytest.raises(pamm.PammError, match="method 'sampled' alone has"):
        pamm.PammConfig("pamm", fp8=False)
    assert pamm.PammConfig(fp8=False) == pamm.PammConfig("sampled", fp8=False)
