"""Each backend against its twin in ``pamm.reference``, on equal inputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pamm import PammConfig, Stream, reference
from pamm.kernels import plain
from pamm.types import Compressed
from tests.helpers import strided
from tests.tolerances import assert_implementation_error

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def distance_to_stand_in(x: Tensor, state: Compressed) -> Tensor:
    """||X_i - alpha_i C_f(i)|| in fp64: what an assignment is judged by, ties being either way."""
    stand_in = (
        state.coefficients.double()[:, None] * state.generators.double()[state.assignment.long()]
    )
    return (x.double() - stand_in).norm(dim=1)


def clear_of_the_threshold(x: Tensor, index: Tensor, tolerance: float | None) -> bool:
    """Whether no row lies where rounding decides if it is kept."""
    if tolerance is None or not len(x):
        return True
    _, _, cosine_squared = reference.assign(x.double(), x[index].double())
    return bool(((cosine_squared - (1 - tolerance**2)).abs() > 1e-3).all())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(0, 70),
    n=st.integers(1, 20),
    m=st.integers(1, 9),
    ratio=st.floats(0.001, 1.0),
    tolerance=st.none() | st.floats(0, 2),
    layout=st.sampled_from(["plain", "transposed", "sliced", "expanded"]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    zeros=st.booleans(),
)
def test_plain_path_equals_the_reference(
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
    x = (strided((tokens, n), layout, torch.float64) * scale).to(dtype)
    if zeros:
        x = x.clone()
        x[::3] = 0
    index = Stream(seed=1).draw(tokens, PammConfig(ratio=ratio).generators(tokens), x.device)
    if not clear_of_the_threshold(x, index, tolerance):
        tolerance = None
    fast, slow = plain.compress(x, index, tolerance), reference.compress(x, index, tolerance)

    assert torch.equal(fast.generators, slow.generators)
    assert fast.assignment.dtype == slow.assignment.dtype
    assert fast.normalization == slow.normalization
    assert torch.equal(fast.coefficients != 0, slow.coefficients != 0)
    rounding = 4 * torch.finfo(dtype).eps * x.double().norm(dim=1)
    difference = distance_to_stand_in(x, fast) - distance_to_stand_in(x, slow)
    assert (difference.abs() <= rounding).all()

    b = strided((tokens, m), layout, dtype)
    product = plain.segment_sum(slow.assignment, slow.coefficients, b, len(index))
    same_dtype = reference.approx_matmul(identity_generators(slow), b)
    truth = reference.approx_matmul(identity_generators(slow, torch.float64), b.double())
    assert_implementation_error(product.to(dtype), same_dtype, truth)


def identity_generators(state: Compressed, dtype: torch.dtype | None = None) -> Compressed:
    """With C = I and beta = 1 the reference's product is B~ itself."""
    dtype = dtype or state.generators.dtype
    return Compressed(
        torch.eye(len(state.generators), dtype=dtype),
        state.assignment,
        state.coefficients.to(dtype),
        torch.ones(()),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [1, 16, 17, 300])
@pytest.mark.parametrize("chunk", [1 << 11, 1 << 20])
def test_chunks_and_both_ways_of_summing_agree(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, k: int, chunk: int
) -> None:
    monkeypatch.setitem(plain._CHUNK, "cpu", chunk)
    x, b = torch.randn(700, 12).to(dtype), torch.randn(700, 33).to(dtype)
    slow = reference.compress(x, torch.arange(k) * 2)
    fast = plain.compress(x, torch.arange(k) * 2, None)
    rounding = 4 * torch.finfo(dtype).eps * x.double().norm(dim=1)
    difference = distance_to_stand_in(x, fast) - distance_to_stand_in(x, slow)
    assert (difference.abs() <= rounding).all()
    product = plain.segment_sum(slow.assignment, slow.coefficients, b, k)
    same_dtype = reference.approx_matmul(identity_generators(slow), b)
    truth = reference.approx_matmul(identity_generators(slow, torch.float64), b.double())
    assert_implementation_error(product.to(dtype), same_dtype, truth)


@pytest.mark.parametrize("k", [16, 300])
def test_repeated_runs_are_bitwise_equal(k: int) -> None:
    x, b = torch.randn(3000, 24), torch.randn(3000, 33)
    index = torch.randperm(3000)[:k]
    runs = []
    for _ in range(3):
        c, f, alpha, _ = plain.compress(x, index, 0.9)
        runs.append((c, f, alpha, plain.segment_sum(f, alpha, b, k)))
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))
