import pytest
import torch

from pamm import reference
from pamm.analysis import theory


def clustered(rows: int = 200, width: int = 8) -> torch.Tensor:
    """Rows about five directions, of either sign and any length."""
    centres = torch.randn(5, width)
    x = centres[torch.arange(rows) % 5] + 0.1 * torch.randn(rows, width)
    return x * torch.randn(rows, 1)


@pytest.mark.parametrize("tolerance", [0.2, 0.5, 0.9])
def test_neighbours_are_those_of_the_neighborhood_condition(tolerance: float) -> None:
    x = clustered(60).double()
    near = torch.cat(list(theory.neighbours(x, tolerance)))
    for i in range(60):
        along = (x @ x[i]) / x.square().sum(1)
        distance = (x[i] - along[:, None] * x).norm(dim=1)
        assert torch.equal(near[i], distance <= tolerance * x[i].norm() + 1e-12)
    assert torch.equal(theory.neighbourhood_sizes(x, tolerance), near.sum(1))


@pytest.mark.parametrize("k", [1, 4, 30])
def test_rows_are_covered_once_their_generator_is_drawn(k: int) -> None:
    """As many as ``reference.compress`` keeps with the same generators."""
    x, tolerance = clustered().double(), 0.4
    orders = theory.draw_orders(len(x), draws=3, device=x.device)
    first = theory.first_covered(x, tolerance, orders)
    for order, row in zip(orders, first, strict=True):
        kept = reference.compress(x, order[:k], tolerance).coefficients != 0
        assert torch.equal(row <= k, kept)


def test_lemma_2_holds() -> None:
    x, delta = clustered(400), 0.1
    smallest = int(theory.neighbourhood_sizes(x, 0.7).min())
    bound = theory.k_bound(len(x), smallest, delta)
    assert bound < len(x), "the data must be dense enough for the bound to say something"
    first = theory.first_covered(x, 0.7, theory.draw_orders(len(x), 100, x.device))
    assert float((first.amax(1) > bound).float().mean()) <= delta


def test_orders_are_permutations() -> None:
    orders = theory.draw_orders(10, draws=4, device=torch.device("cpu"))
    assert torch.equal(orders.sort(1).values, torch.arange(10).expand(4, 10))
    assert len({tuple(order.tolist()) for order in orders}) > 1


def test_multiplications_are_those_of_the_papers_appendix() -> None:
    b, n, m, k = 1000, 30, 20, 7
    assert theory.exact_multiplications(b, n, m) == b * n * m
    counts = theory.pamm_multiplications(b, n, m, k)
    assert sum(counts.values()) == b * k * n + b * n + b * m + k * n * m
    leading = counts["similarities"] + counts["product"]
    assert theory.gamma(b, m, k) == pytest.approx(b * n * m / leading)
