"""A weight gradient from some of the tokens, drawn in backward by the size of their gradients.

In dW = sum_i g_i x_i.T a few tokens have most of the gradient, most of all in q, k and v. Of b
tokens c are drawn, token i as often as

    q_i = min(1, ||g_i|| / tau)  on the average, with tau such that sum_i q_i = c

    dW ~ sum over the drawn s of (1 / q_s) g_s x_s.T

which is unbiased, and has the least noise that c tokens allow where all ||x_i|| are alike (Drineas,
Kannan and Mahoney, 2006), as behind a norm. What a token's row in X is, must be known in backward.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from pamm.types import accumulation_dtype

ROUNDS = 4
FLOOR = 1e-2
"""Of the mean size; what is tiny is drawn more often than its due, lest a rare draw weigh much."""
TINY = 1e-30
UNIT = 1 << 24
"""Shares are added up in whole numbers of 1 / UNIT: without rounding, so in any order."""


def draw(
    g: Float[Tensor, "tokens m"], c: int, offset: Float[Tensor, " 1"]
) -> tuple[Int64[Tensor, " c"], Float[Tensor, " c"]]:
    """c tokens of those with gradients ``g``, and their weights; ``offset`` in [0, 1) is random."""
    size = torch.linalg.vector_norm(g, dim=1, dtype=accumulation_dtype(g.dtype))
    return drawn(shares(size, c), c, offset)


def shares(size: Float[Tensor, " tokens"], c: int) -> Float[Tensor, " tokens"]:
    """q, up to a factor near 1. Each round takes the tokens above tau for sure, c less so many are
    left for the others, and so tau falls to where no more are above it.
    """
    size = size + (FLOOR * size.mean() + TINY)
    tau = size.sum() / c
    for _ in range(ROUNDS):
        is_sure = size > tau
        tau = torch.where(is_sure, 0, size).sum() / (c - is_sure.sum()).clamp(min=1)
    return (size / tau).clamp(max=1)


def drawn(
    q: Float[Tensor, " tokens"], c: int, offset: Float[Tensor, " 1"]
) -> tuple[Int64[Tensor, " c"], Float[Tensor, " c"]]:
    """c tokens and their weights 1 / q, systematically: at equal steps along the sum of q.

    ``offset`` is the place of the first in its step. Where sum q is not c but near it, the expected
    number of draws of i is q_i c / sum q, and the weight its inverse. NaN where q has any.
    """
    units = (q * UNIT).nan_to_num().long()
    along = units.cumsum(0)
    total = along[-1]
    # How many are drawn up to each token.
    upto = (along.double() * (c / total.double()) - offset).nan_to_num().ceil().long()
    upto = torch.where(along == total, c, upto)
    index = torch.searchsorted(upto, torch.arange(c, device=q.device), right=True)
    weight = total.to(q.dtype) / c / units[index].to(q.dtype)
    return index, weight + 0 * q.sum()


def rows(
    x: Float[Tensor, "tokens n"],
    g: Float[Tensor, "tokens m"],
    index: Int64[Tensor, " c"],
    weight: Float[Tensor, " c"],
) -> tuple[Float[Tensor, "c n"], Float[Tensor, "c m"]]:
    """Of X, times the weights, and of G, both in its dtype: G_c.T @ X_c is about G.T @ X.

    The weights go to X, whose rows do not overflow.
    """
    return (x[index] * weight[:, None]).to(g.dtype), g[index]
