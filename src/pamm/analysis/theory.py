"""The paper's theory on given rows: coverage, neighbourhoods, the bound of Lemma 2, complexity."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

_CHUNK = 512  # rows whose cosines with all others are in memory at a time


def neighbours(x: Float[Tensor, "b n"], tolerance: float) -> Iterator[Bool[Tensor, "chunk b"]]:
    """Which rows A_j can stand for which A_i: ||A_i - h(A_i, A_j)|| <= eps ||A_i||, in chunks of i.

    That is csim^2 >= 1 - eps^2; the relation is symmetric. A row is always its own neighbour.
    """
    norm = x.norm(dim=1, keepdim=True)
    unit = torch.where(norm > 0, x / norm, 0)
    for start in range(0, len(x), _CHUNK):
        near = (unit[start : start + _CHUNK] @ unit.T).square() >= 1 - tolerance**2
        own = torch.arange(start, start + len(near), device=x.device)
        near[torch.arange(len(near), device=x.device), own] = True
        yield near


def neighbourhood_sizes(x: Float[Tensor, "b n"], tolerance: float) -> Int64[Tensor, " b"]:
    """|N_eps(i)| of every row; the smallest is the paper's n_min.

    Examples:
        >>> neighbourhood_sizes(torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0]]), 0.5)
        tensor([2, 2, 1])
    """
    return torch.cat([near.sum(1) for near in neighbours(x, tolerance)])


def first_covered(
    x: Float[Tensor, "b n"], tolerance: float, orders: Int64[Tensor, "draws b"]
) -> Int64[Tensor, "draws b"]:
    """How many generators it takes until a row has one in its neighbourhood.

    Args:
        x: the rows.
        tolerance: eps.
        orders: rows in the order in which they are drawn; the first k are the k generators.
    """
    places = torch.empty_like(orders)
    places.scatter_(1, orders, torch.arange(1, len(x) + 1, device=x.device).expand_as(orders))
    parts = [
        torch.stack([torch.where(near, place, len(x)).amin(1) for place in places])
        for near in neighbours(x, tolerance)
    ]
    return torch.cat(parts, dim=1)


def draw_orders(tokens: int, draws: int, device: torch.device) -> Int64[Tensor, "draws b"]:
    """Orders for ``first_covered``, uniform without replacement; the same at each call."""
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(tokens, generator=generator) for _ in range(draws)]
    return torch.stack(orders).to(device)


def k_bound(tokens: int, smallest: int, delta: float) -> float:
    """b / n_min ln(b / delta): more generators cover all rows with probability 1 - delta (Lemma 2).

    Above b it says nothing: b generators are all rows.

    Examples:
        >>> round(k_bound(tokens=1000, smallest=100, delta=0.1))
        92
    """
    return tokens / smallest * math.log(tokens / delta)


def gamma(tokens: int, m: int, k: int) -> float:
    """b m / (k (b + m)): how many times fewer multiplications PAMM takes, by its leading terms.

    Examples:
        >>> round(gamma(tokens=16384, m=2048, k=64), 1)
        28.4
    """
    return tokens * m / (k * (tokens + m))


def exact_multiplications(tokens: int, n: int, m: int) -> int:
    """Of X.T @ G: b n m."""
    return tokens * n * m


def pamm_multiplications(tokens: int, n: int, m: int, k: int) -> dict[str, int]:
    """Of PAMM, part by part (the paper's appendix on complexity)."""
    return {
        "similarities": tokens * k * n,
        "norms": tokens * n,
        "segment sum": tokens * m,
        "product": k * n * m,
    }
