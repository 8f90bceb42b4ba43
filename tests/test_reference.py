"""The reference against the paper's statements: brute force, least squares, Monte Carlo."""

import math

import pytest
import torch

from pamm import reference
from tests.tolerances import CLUSTERED_RELATIVE_ERROR, relative_error


def rows(tokens: int = 60, n: int = 7) -> torch.Tensor:
    return torch.randn(tokens, n, dtype=torch.float64)


def test_assignment_is_the_brute_force_nearest_point_on_any_generators_line() -> None:
    a, c = rows(), rows(5)
    f, alpha, _ = reference.assign(a, c)
    coefficients = (a @ c.T) / (c**2).sum(1)  # alpha(i, j)
    distance = (a[:, None, :] - coefficients[:, :, None] * c[None]).norm(dim=2)
    assert torch.equal(f, distance.argmin(dim=1))
    assert torch.allclose(alpha, coefficients.gather(1, f[:, None]).squeeze(1))


def test_a_negative_cosine_is_as_good_as_a_positive_one() -> None:
    """The listing maximises csim without the absolute value; Lemma 1 needs it."""
    c = torch.eye(2, dtype=torch.float64)
    f, alpha, _ = reference.assign(torch.tensor([[-3.0, 1.0]], dtype=torch.float64), c)
    assert f.item() == 0
    assert alpha.item() == -3.0


def test_alpha_is_the_least_squares_coefficient() -> None:
    a, c = rows(), rows(5)
    f, alpha, _ = reference.assign(a, c)
    for row, j, value in zip(a, f, alpha, strict=True):
        solution = torch.linalg.lstsq(c[j][:, None], row[:, None]).solution
        assert value.item() == pytest.approx(solution.item())


def test_cosine_squared_is_one_minus_the_squared_relative_distance() -> None:
    a, c = rows(), rows(5)
    f, alpha, cosine_squared = reference.assign(a, c)
    distance = (a - alpha[:, None] * c[f]).norm(dim=1) / a.norm(dim=1)
    assert torch.allclose(cosine_squared, 1 - distance**2)


def test_generators_stand_for_themselves_with_coefficient_exactly_one() -> None:
    a = rows().to(torch.bfloat16)
    index = torch.tensor([3, 50, 8])
    c, f, alpha, _ = reference.compress(a, index)
    assert torch.equal(c, a[index])
    assert f[index].tolist() == [0, 1, 2]
    assert alpha[index].tolist() == [1, 1, 1]


@pytest.mark.parametrize("tolerance", [0.3, 0.6, 0.9])
def test_exactly_the_rows_outside_the_neighbourhood_are_dropped(tolerance: float) -> None:
    a, index = rows(300, 4), torch.arange(6)
    c, f, kept, beta = reference.compress(a, index, tolerance)
    _, alpha, _ = reference.assign(a, c)
    distance = (a - alpha[:, None] * c[f.long()]).norm(dim=1)
    inside = distance <= tolerance * a.norm(dim=1)
    assert 0 < inside.sum() < len(a)
    assert torch.equal(kept != 0, inside)
    assert beta.item() == pytest.approx(300 / inside.sum().item())


@pytest.mark.parametrize("tolerance", [1.0, 1.5, math.inf])
def test_tolerance_of_one_and_above_equals_none(tolerance: float) -> None:
    a, index = rows(), torch.arange(4)
    for one, other in zip(
        reference.compress(a, index, tolerance), reference.compress(a, index, None), strict=True
    ):
        assert torch.equal(one, other)


def test_tolerance_zero_keeps_generators_alone_even_with_duplicates_and_zero_rows() -> None:
    a = torch.cat([rows(4), rows(4).zero_(), rows(4)])
    a[8] = a[0]  # a duplicate of a generator would pass the test of its cosine
    index = torch.tensor([0, 2])
    _, _, alpha, beta = reference.compress(a, index, 0.0)
    assert alpha.nonzero().flatten().tolist() == [0, 2]
    assert beta.item() == 12 / 2


def test_with_every_row_a_generator_the_product_is_exact() -> None:
    a, b = rows(), rows(60, 3)
    product = reference.approx_matmul(reference.compress(a, torch.randperm(60)), b)
    assert torch.allclose(product, a.T @ b)


def test_approx_matmul_equals_the_product_with_the_reconstructed_matrix() -> None:
    a, b = rows(), rows(60, 3)
    compressed = reference.compress(a, torch.arange(9), 0.8)
    c, f, alpha, beta = compressed
    reconstructed = alpha[:, None] * c[f.long()]
    expected = beta.double() * reconstructed.T @ b
    assert torch.allclose(reference.approx_matmul(compressed, b), expected)


def test_beta_makes_the_estimate_unbiased_when_rows_are_kept_at_random() -> None:
    """Monte Carlo over the draw at eps = 0, where a row is kept exactly if it was drawn."""
    a, b = rows(24, 3), rows(24, 2)
    exact = a.T @ b
    generator = torch.Generator().manual_seed(1)
    draws = torch.stack(
        [
            reference.approx_matmul(reference.compress(a, reference.draw(24, 6, generator), 0.0), b)
            for _ in range(4000)
        ]
    )
    standard_error = draws.std(dim=0) / math.sqrt(len(draws))
    assert ((draws.mean(dim=0) - exact).abs() < 4 * standard_error).all()


def test_beta_corrects_the_shrinkage_that_dropping_rows_causes() -> None:
    """Rows in tight bundles; with few generators whole bundles are dropped, at random."""
    centres = 10 * rows(12, 40)
    a = centres.repeat_interleave(5, 0) + 0.01 * rows(60, 40)
    b = torch.ones(60, 1, dtype=torch.float64)
    exact = a.T @ b
    generator = torch.Generator().manual_seed(1)
    with_beta, without = torch.zeros_like(exact), torch.zeros_like(exact)
    for _ in range(1500):
        compressed = reference.compress(a, reference.draw(60, 6, generator), 0.1)
        with_beta += reference.approx_matmul(compressed, b) / 1500
        plain = compressed._replace(normalization=torch.ones(()))
        without += reference.approx_matmul(plain, b) / 1500
    assert relative_error(with_beta, exact) < 0.1
    assert relative_error(without, exact) > 0.3


def test_approximation_error_is_small_where_rows_come_in_bundles() -> None:
    centres = torch.randn(16, 32)
    noise = 0.05 * torch.randn(2048, 32)
    a = centres[torch.randint(16, (2048,))] * torch.rand(2048, 1) + noise * torch.rand(2048, 1)
    b = torch.randn(2048, 8) + a[:, :8]
    index = reference.draw(2048, 64, torch.Generator().manual_seed(3))
    product = reference.approx_matmul(reference.compress(a, index), b)
    assert relative_error(product, a.T @ b) < CLUSTERED_RELATIVE_ERROR
