"""Each backend against its twin in ``pamm.reference``, on equal inputs.

Without a GPU the Triton kernels run in Triton's interpreter; with one, all of this runs there too.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pamm import PammConfig, Stream, ops, reference
from pamm.kernels import plain
from pamm.permutation import permutation_prefix
from pamm.types import Compressed
from tests.helpers import strided
from tests.tolerances import assert_implementation_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
LOW = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("torch", "triton")


def distance_to_stand_in(x: Tensor, state: Compressed) -> Tensor:
    """||X_i - alpha_i C_f(i)|| in fp64: what an assignment is judged by, ties being either way."""
    c, f, alpha, _ = state
    return (x.double() - alpha.double()[:, None] * c.double()[f.long()]).norm(dim=1)


def clear_of_the_threshold(x: Tensor, index: Tensor, tolerance: float | None) -> bool:
    """Whether no row lies where rounding decides if it is kept; generators always are."""
    if tolerance is None or not len(x):
        return True
    _, _, cosine_squared = reference.assign(x.double(), x[index].double())
    distance = (cosine_squared - (1 - tolerance**2)).abs()
    distance[index] = 1
    return bool((distance > 1e-3).all())


def assert_equal_states(x: Tensor, fast: Compressed, slow: Compressed) -> None:
    assert torch.equal(fast.generators, slow.generators)
    assert fast.assignment.dtype == slow.assignment.dtype
    assert fast.normalization == slow.normalization
    assert torch.equal(fast.coefficients != 0, slow.coefficients != 0)
    rounding = 4 * torch.finfo(x.dtype).eps * x.double().norm(dim=1)
    difference = distance_to_stand_in(x, fast) - distance_to_stand_in(x, slow)
    assert (difference.abs() <= rounding).all()


def assert_product(backend: str, state: Compressed, b: Tensor, columns: int | None = None) -> None:
    """Of ``columns`` columns of b at a time, judged together: in a number or two alone the error of
    the plain computation, which is the measure, may be next to none by luck."""
    parts = b.split(columns or max(1, b.shape[1]), dim=1)
    product = torch.cat([ops.weight_grad(state, part, backend).T for part in parts], dim=1)
    same_dtype = reference.approx_matmul(state, b)
    c, f, alpha, beta = state
    wide = Compressed(c.double(), f, alpha.double(), beta)
    assert_implementation_error(product, same_dtype, reference.approx_matmul(wide, b.double()))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # shrinking takes minutes in the interpreter
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    dtype=st.sampled_from((*LOW, torch.float64)),
    tokens=st.integers(0, 150),
    n=st.integers(1, 70),
    m=st.integers(1, 40),
    ratio=st.floats(0.001, 1.0),
    tolerance=st.none() | st.floats(0, 2),
    layout=st.sampled_from(["plain", "transposed", "sliced", "expanded"]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    zeros=st.booleans(),
)
def test_equals_the_reference(
    backend: str,
    dtype: torch.dtype,
    tokens: int,
    n: int,
    m: int,
    ratio: float,
    tolerance: float | None,
    layout: str,
    scale: float,
    zeros: bool,
) -> None:
    torch.manual_seed(0)
    if backend == "triton" and dtype == torch.float64:
        dtype = torch.float32
    x = (strided((tokens, n), layout, torch.float64) * scale).to(DEVICE, dtype)
    if zeros:
        x = x.clone()
        x[::3] = 0
    index = (
        Stream(seed=1).draw(tokens, PammConfig("pamm", ratio).generators(tokens), CPU).to(DEVICE)
    )
    if not clear_of_the_threshold(x, index, tolerance):
        tolerance = None
    slow = reference.compress(x, index, tolerance)
    assert_equal_states(x, ops.compress(x, index, tolerance, backend), slow)
    several = m * -(-8 // m)  # columns, eight or more
    b = strided((tokens, several), layout, torch.float64) / scale  # their product fits fp16
    assert_product(backend, slow, b.to(DEVICE, dtype), m)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(
    ("tokens", "n", "m", "k"),
    [(1, 1, 1, 1), (400, 33, 65, 300), (261, 130, 257, 17), (257, 64, 32, 256)],
)
@pytest.mark.parametrize("tolerance", [None, 0.0, 0.9])
def test_odd_shapes_many_generators_and_several_tiles(
    backend: str, dtype: torch.dtype, tokens: int, n: int, m: int, k: int, tolerance: float | None
) -> None:
    x = torch.randn(tokens, n).to(DEVICE, dtype)
    index = torch.randperm(tokens)[:k].to(DEVICE)
    slow = reference.compress(x, index, tolerance)
    if tolerance == 0 or clear_of_the_threshold(x, index, tolerance):
        assert_equal_states(x, ops.compress(x, index, tolerance, backend), slow)
    assert_product(backend, slow, torch.randn(tokens, m).to(DEVICE, dtype))


@pytest.mark.parametrize("k", [1, 64, 65, 300])
@pytest.mark.parametrize("chunk", [1 << 11, 1 << 20])
def test_plain_path_in_chunks_and_in_both_ways_of_summing(
    monkeypatch: pytest.MonkeyPatch, k: int, chunk: int
) -> None:
    monkeypatch.setitem(plain._CHUNK, "cpu", chunk)
    x, b = torch.randn(700, 12), torch.randn(700, 33)
    slow = reference.compress(x, torch.arange(k) * 2)
    assert_equal_states(x, plain.compress(x, torch.arange(k) * 2, None), slow)
    assert_product("torch", slow, b)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("k", [3, 70])
@pytest.mark.parametrize("tolerance", [None, 0.5])
@pytest.mark.parametrize("where", ["x", "b"])
def test_nan_and_inf_reach_the_product(
    backend: str, bad: float, k: int, tolerance: float | None, where: str
) -> None:
    """From a row that is a generator and from one that is not; 70 generators fill two tiles."""
    for row in (0, 69, 99):
        x, b = torch.randn(100, 12, device=DEVICE), torch.randn(100, 7, device=DEVICE)
        (x if where == "x" else b)[row, 3] = bad
        state = ops.compress(x, torch.arange(k, device=DEVICE), tolerance, backend)
        assert not ops.weight_grad(state, b, backend).isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [16, 300])
def test_repeated_runs_are_bitwise_equal(backend: str, k: int) -> None:
    x, b = torch.randn(500, 24, device=DEVICE), torch.randn(500, 33, device=DEVICE)
    index = torch.randperm(500)[:k].to(DEVICE)
    runs = []
    for _ in range(3):
        state = ops.compress(x, index, 0.9, backend)
        runs.append((*state, ops.weight_grad(state, b, backend)))
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


def test_every_output_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers arrive full of NaN; what a kernel forgets to write would show."""
    empty = torch.empty

    def poisoned(*shape: object, **options: object) -> Tensor:
        tensor = empty(*shape, **options)  # type: ignore[call-overload]
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 113)

    x, b = torch.randn(530, 70, device=DEVICE), torch.randn(530, 130, device=DEVICE)
    index = torch.randperm(530)[:70].to(DEVICE)
    slow = reference.compress(x, index, 0.95)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        state = ops.compress(x, index, 0.95, "triton")
        product = ops.weight_grad(state, b, "triton")
        drawn = ops.draw(torch.tensor([0, 1, 2], device=DEVICE), 0, 530, 70, "triton")
    assert all(part.isfinite().all() for part in (*state, product))
    assert (state.assignment < 70).all()
    assert state.normalization == slow.normalization
    assert drawn.unique().numel() == 70


@pytest.mark.parametrize(
    ("tokens", "k"), [(1, 1), (5, 3), (7, 7), (1000, 60), (4096, 1500), (131_072, 256)]
)
@pytest.mark.parametrize("position", [0, 1, 3 << 32, (1 << 40) + 5])
def test_the_draw_kernel_gives_the_same_integers(tokens: int, k: int, position: int) -> None:
    for low, high, rank in ((0, 0, 0), (0xFFFFFFFF, 0x80000001, 1), (12345, 0xDEADBEEF, 70_000)):
        state = torch.tensor([position, low, high])
        on_device = state.clone().to(DEVICE)
        drawn = ops.draw(on_device, rank, tokens, k, "triton")
        assert torch.equal(drawn.cpu(), permutation_prefix(state, rank, tokens, k))
        assert torch.equal(on_device.cpu(), state)
        following = ops.draw_next(on_device, rank, tokens, k, "triton")
        state[0] += 1
        assert torch.equal(on_device.cpu(), state)
        assert torch.equal(following.cpu(), permutation_prefix(state, rank, tokens, k))
