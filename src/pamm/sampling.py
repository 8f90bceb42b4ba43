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

_ROUNDS = 6
_FLOOR = 1e-2
"""Of the mean size; what is tiny is drawn more often than its due, lest a rare draw weigh much."""


def shares(size: Float[Tensor, " tokens"], c: int) -> Float[Tensor, " tokens"]:
    """q, up to a factor near 1. Each round takes the tokens above tau for sure, c less so many are
    left for the others, and so tau falls to where no more are above it.
    """
    size = size + (_FLOOR * size.mean() + torch.finfo(size.dtype).tiny)
    tau = size.sum() / c
    for _ in range(_ROUNDS):
        is_sure = size > tau
        tau = torch.where(is_sure, 0, size).sum() / (c - is_sure.sum()).clamp(min=1)
    return (size / tau).clamp(max=1)


def drawn(
    q: Float[Tensor, " tokens"], c: int, offset: Float[Tensor, " 1"]
) -> tuple[Int64[Tensor, " c"], Float[Tensor, " c"]]:
    """c tokens and their weights 1 / q, systematically: at equal steps along the sum of q.

    ``offset``, uniform in [0, 1), is the place of the first in its step. Where sum q is not c but
    near it, the expected number of draws of i is q_i c / sum q, and the weight its inverse.
    """
    along = q.double().cumsum(0)
    step = along[-1] / c
    at = (torch.arange(c, device=q.device) + offset) * step
    index = torch.searchsorted(along, at, right=True).clamp(max=len(q) - 1)
    return index, step.to(q.dtype) / q[index]


def weight_grad(
    x: Float[Tensor, "tokens n"], g: Float[Tensor, "tokens m"], c: int, offset: Float[Tensor, " 1"]
) -> Float[Tensor, "m n"]:
    """About G.T @ X, from c tokens. The weights go to the rows of X, which do not overflow."""
    if c >= len(g):
        return g.T @ x.to(g.dtype)
    size = torch.linalg.vector_norm(g, dim=1, dtype=accumulation_dtype(g.dtype))
    index, weight = drawn(shares(size, c), c, offset)
    return g[index].T @ (x[index] * weight[:, None]).to(g.dtype)
