import pytest
import torch

from pamm.compressors import CompAct
from pamm.compressors.compact import _gaussian
from pamm.config import PammConfig
from pamm.stream import Stream
from tests.tolerances import SMALLEST_P, assert_implementation_error


def test_the_gradient_is_unbiased_and_its_variance_is_that_of_a_gaussian_projection() -> None:
    """E[S S.T] = I, and by Isserlis E||S (X S).T G - X.T G||^2 = (n ||O||^2 + ||O||^2) / k'."""
    draws, n, k = 4000, 12, 3
    x, grad = torch.randn(50, n), torch.randn(50, 5)
    method, stream = CompAct(PammConfig("compact", ratio=1 / 4)), Stream(seed=1)
    samples = torch.stack(
        [method.weight_grad(method.compress(x, stream.draw), grad) for _ in range(draws)]
    ).double()
    exact = (grad.T @ x).double()
    assert samples.shape[1:] == exact.shape
    # A mean of many draws is normal; chi-square over all entries would need their covariance.
    z = (samples.mean(0) - exact) / (samples.std(0) / draws**0.5)
    worst = torch.special.ndtr(-z.abs().max()) * 2 * z.numel()
    assert worst > SMALLEST_P, f"biased: an entry is {z.abs().max():.1f} standard errors off"
    spread = float((samples - exact).square().sum((1, 2)).mean())
    expected = float((n + 1) / k * exact.square().sum())
    assert spread == pytest.approx(expected, rel=0.1)


def test_directions_are_normal_and_follow_from_the_seed_alone() -> None:
    seed = torch.tensor([12345]).expand(256)
    matrix = _gaussian(seed, 64)
    assert torch.equal(matrix, _gaussian(seed.clone(), 64))
    assert not torch.equal(matrix, _gaussian(seed + 1, 64))
    ordered = (matrix.flatten() * 64**0.5).double().sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    distance = float((torch.special.ndtr(ordered) - steps).abs().max())
    # Kolmogorov's bound: 2 exp(-2 N d^2).
    assert 2 * torch.tensor(-2 * len(ordered) * distance**2).exp() > SMALLEST_P


def test_the_state_is_the_projection_and_eight_bytes() -> None:
    method = CompAct(PammConfig("compact", ratio=1 / 4))
    projected, seed = method.compress(torch.randn(100, 12).bfloat16(), Stream().draw)
    assert projected.shape == (100, 3)
    assert projected.dtype == torch.bfloat16
    assert seed.untyped_storage().nbytes() == 8
    assert method.state_bytes(100, 12, torch.bfloat16) == 100 * 3 * 2 + 8


def test_every_pass_draws_other_directions() -> None:
    x, method, stream = torch.randn(20, 12), CompAct(PammConfig("compact")), Stream()
    first, second = (method.compress(x, stream.draw) for _ in range(2))
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_products_are_as_exact_as_their_dtype(dtype: torch.dtype) -> None:
    x, grad = torch.randn(200, 12).to(dtype), torch.randn(200, 7).to(dtype)
    method = CompAct(PammConfig("compact", ratio=1 / 2))
    projected, seeds = method.compress(x, Stream().draw)
    directions = _gaussian(seeds, 6)
    truth = grad.double().T @ projected.double() @ directions.double().T
    plain = grad.T @ projected @ directions.to(dtype).T
    assert_implementation_error(method.weight_grad((projected, seeds), grad), plain, truth)


def test_a_gradient_of_another_dtype_than_x_gives_one_of_its_own() -> None:
    """As in PEFT, whose adapters are fp32 by default, on a base in bf16."""
    x, grad = torch.randn(20, 12).bfloat16(), torch.randn(20, 7)
    method = CompAct(PammConfig("compact", ratio=1 / 2))
    projected, seeds = method.compress(x, Stream().draw)
    made = method.weight_grad((projected, seeds), grad)
    assert made.dtype == torch.float32
    assert torch.equal(made, method.weight_grad((projected.float(), seeds), grad))
