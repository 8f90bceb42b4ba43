"""A weight gradient from some of the tokens, drawn in backward by the size of their gradients.

In dW = sum_i g_i x_i.T a few tokens have most of the gradient, and a few directions most of X. With
these directions, the orthonormal columns of P, and z_i = P.T x_i the gradient is the sum of a part
that takes few multiplications for all tokens and one with little in it,

    dW = (sum_i g_i z_i.T) P.T + sum_i g_i (x_i - P z_i).T

and of the second one c of the b tokens are enough. Token i is drawn as often as

    q_i = min(1, ||g_i|| / tau)  on the average, with tau such that sum_i q_i = c

    dW ~ (sum_i g_i z_i.T) P.T + sum over the drawn s of (1 / q_s) g_s (x_s - P z_s).T

which is unbiased whatever P is, and of such draws has the least noise that c tokens allow where all
||x_i - P z_i|| are alike (Drineas, Kannan and Mahoney, 2006). P is carried from step to step, as
``pamm.subspace`` does. What a token's row in X is, must be known in backward.

Both parts are one product: the rows of P.T, and those of sum_i z_i g_i.T for them, join the drawn.
Without directions the first part is none of it, and all of X is drawn from.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from pamm.types import accumulation_dtype

ROUNDS = 4
FLOOR = 1e-2
"""Of the mean size; what is tiny is drawn more often than its due, lest a rare draw weigh much."""
TINY = 1e-30
UNIT = 1 << 24
"""Shares are added up in whole numbers of 1 / UNIT: without rounding, so in any order."""
_ALIGNMENT = 64


def sizes(g: Float[Tensor, "tokens m"]) -> Float[Tensor, " tokens"]:
    """||g_i||, in fp32 (fp64 for fp64)."""
    return torch.linalg.vector_norm(g, dim=1, dtype=accumulation_dtype(g.dtype))


def draw(
    size: Float[Tensor, " tokens"], c: int, offset: Float[Tensor, " 1"]
) -> tuple[Int64[Tensor, " c"], Float[Tensor, " c"]]:
    """c tokens of those of these sizes, and their weights; ``offset`` in [0, 1) is random."""
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
    number of draws of i is q_i c / sum q, and the weight its inverse.
    """
    units = (q * UNIT).nan_to_num().long()
    along = units.cumsum(0)
    total = along[-1]
    # How many are drawn up to each token.
    upto = (along.double() * (c / total.double()) - offset).nan_to_num().ceil().long()
    upto = torch.where(along == total, c, upto)
    index = torch.searchsorted(upto, torch.arange(c, device=q.device), right=True)
    weight = total.to(q.dtype) / c / units[index].to(q.dtype)
    return index, weight


def directions(most: int, n: int) -> int:
    """How many columns P has for n features: ``most``, and no more than a quarter of n."""
    return min(most, max(1, n // 4))


class Whole(NamedTuple):
    """The part of the gradient that no token is missing from, (basis @ inner).T."""

    z: Float[Tensor, "tokens k"]
    """Of which z @ basis.T is what X has in the directions."""
    basis: Float[Tensor, "n k"]
    """P, times ``unit``."""
    inner: Float[Tensor, "k m"]
    """z.T @ G."""


def whole(
    x: Float[Tensor, "tokens n"], basis: Float[Tensor, "n k"], g: Float[Tensor, "tokens m"]
) -> Whole:
    """That of X and G, for a basis whose columns are ``unit`` long."""
    z = x @ (basis / unit(len(basis)) ** 2)
    return Whole(z, basis, z.to(g.dtype).T @ g)


def unit(n: int) -> float:
    """By which the columns of P are longer here: near sqrt(n), so that neither side of a product
    leaves fp16's range before dW does; a power of two, so that nothing is rounded.
    """
    return 2.0 ** round(math.log2(n) / 2)


def rows(
    x: Float[Tensor, "tokens n"],
    g: Float[Tensor, "tokens m"],
    index: Int64[Tensor, " c"],
    weight: Float[Tensor, " c"],
    whole: Whole | None = None,
) -> tuple[Float[Tensor, "rows padded_n"], Float[Tensor, "rows padded_m"]]:
    """What stands for X and for G, in G's dtype: G_c.T @ X_c is about G.T @ X.

    The c drawn rows, times the weights on G's side: a weight is large where g is small, and what
    overflows in fp16 all the same shrinks with the scale of the loss. Behind them those of
    ``whole``, less which the rows of X are. Both have ``padded`` columns, of which those past n and
    m are zero.
    """
    x_rows, g_rows = rest(x, index, whole).to(g.dtype), (g[index] * weight[:, None]).to(g.dtype)
    if whole is not None:
        x_rows = torch.cat((x_rows, whole.basis.T.to(g.dtype)))
        g_rows = torch.cat((g_rows, whole.inner))
    return _pad(x_rows), _pad(g_rows)


def rest(
    x: Float[Tensor, "tokens n"], index: Int64[Tensor, " c"], whole: Whole | None
) -> Float[Tensor, "c n"]:
    """Rows of X, less what the directions have of them."""
    if whole is None:
        return x[index]
    wide = accumulation_dtype(x.dtype)
    return x[index].to(wide) - whole.z[index].to(wide) @ whole.basis.to(wide).T


def padded(columns: int) -> int:
    """So many or a few more, a multiple of 128 bytes in 16 bits: products are slow of others."""
    return -(-columns // _ALIGNMENT) * _ALIGNMENT


def _pad(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, padded(rows.shape[1]) - rows.shape[1]))
