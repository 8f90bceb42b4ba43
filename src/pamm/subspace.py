"""The subspace method in plain PyTorch: X on a few directions, in 4 bits a number.

X of shape (tokens, n) is kept as X Q, with k directions Q of length n in place of n features:

    Q     = [Q1, (I - Q1 Q1.T) E_J]         Q1 (n, k1): where most of X's energy lies, carried along
                                            E_J (n, k2): k2 of the n unit vectors, drawn anew
    dW.T ~= Q diag(w) ((X Q).T @ G)         w = 1 for Q1, n / k2 for the others

Over the draws of J the mean of (n / k2) E_J E_J.T is I, so that of Q diag(w) Q.T is
Q1 Q1.T + (I - Q1 Q1.T) = I: the gradient is unbiased, whatever Q1 is. Its noise is what dW has
outside of Q1, times about sqrt(n / k2).

X Q is rounded at random to 16 levels a direction, unbiased as well.
"""

import torch
from jaxtyping import Float, Integer, UInt8
from torch import Tensor

from pamm.permutation import GOLDEN, mix
from pamm.types import accumulation_dtype

LEVELS = 16
FRESH = 4
"""One direction in so many is drawn anew; the others are carried."""
_MULTIPLE = 16  # the tensor cores' tile

FIRST, EVERY = 8, 64
"""Q1 is refreshed in each of the first passes, and then in every 64th."""
SAMPLE = 4096
"""Rows of X that a refresh looks at."""
_SHIFT = 1e-6  # of the largest: directions that X does not have stay as they are
_CHUNK = 1 << 20


def directions(ratio: float, n: int) -> tuple[int, int]:
    """k1 carried and k2 fresh directions: together the share ``ratio`` of n, in whole tiles."""
    k = min(n, -(-max(1, round(ratio * n)) // _MULTIPLE) * _MULTIPLE)
    fresh = -(-k // FRESH)
    return k - fresh, fresh


def basis(carried: Float[Tensor, "n k1"], drawn: Integer[Tensor, " k2"]) -> Float[Tensor, "n k"]:
    """Q = [Q1, (I - Q1 Q1.T) E_J]."""
    unit = carried.new_zeros(len(carried), len(drawn)).scatter_(0, drawn[None], 1.0)
    return torch.cat([carried, unit - carried @ carried[drawn].T], dim=1)


def encode(
    z: Float[Tensor, "tokens k"], drawn: Integer[Tensor, " k2"]
) -> tuple[UInt8[Tensor, "tokens half"], Float[Tensor, " k"]]:
    """z as 4-bit codes c and a scale for each column: z ~ (c - 7.5) scale, unbiased.

    c = floor(z / scale + 7.5 + u), with u uniform in [0, 1) by a hash of the place and of what was
    drawn, so that every device rounds alike. Column j < half lies in the low four bits of a byte,
    column j + half in the high ones.
    """
    half = -(-z.shape[1] // 2)
    wide = accumulation_dtype(z.dtype)
    scale = (z.abs().amax(0) if len(z) else z.new_zeros(z.shape[1])).to(wide) / (LEVELS / 2 - 0.5)
    inverse = torch.where(scale == 0, 0, 1 / scale)
    key = mix((drawn[0] * GOLDEN & 0xFFFFFFFF) ^ mix(drawn[-1]))
    codes = z.new_empty(len(z), half, dtype=torch.uint8)
    column = torch.arange(half, device=z.device)
    rows = max(1, _CHUNK // max(half, 1))
    for start in range(0, len(z), rows):
        part = z[start : start + rows].to(wide) * inverse + (LEVELS / 2 - 0.5)
        place = torch.arange(start, start + len(part), device=z.device)[:, None] * half + column
        word = mix((place & 0xFFFFFFFF) ^ key)
        uniform = torch.cat([word & 0xFFFF, word >> 16], dim=1)[:, : z.shape[1]].to(wide) / 65536
        code = (part + uniform).floor_().clamp_(0, LEVELS - 1).nan_to_num_().to(torch.uint8)
        high = torch.nn.functional.pad(code[:, half:], (0, 2 * half - z.shape[1]))
        codes[start : start + rows] = code[:, :half] | (high << 4)
    return codes, scale


def decode(
    codes: UInt8[Tensor, "tokens half"], k: int, dtype: torch.dtype
) -> Float[Tensor, "tokens k"]:
    """c - 7.5: what ``encode`` kept, in units of the scale."""
    return torch.cat([codes & 15, codes >> 4], dim=1)[:, :k].to(dtype) - (LEVELS / 2 - 0.5)


def refreshed(
    carried: Float[Tensor, "n k1"], rows: Float[Tensor, "sample n"]
) -> Float[Tensor, "n k1"]:
    """Q1 after one subspace iteration: orthonormal columns that span (R.T R + shift) Q1.

    R are some rows of X. By Cholesky's factor of the Gram matrix, in fp64. The columns come out in
    the order of their energy. Where X is not finite, Q1 stays.
    """
    rows, carried64 = rows.to(torch.promote_types(rows.dtype, torch.float32)), carried.double()
    image = (rows.T @ (rows @ carried.to(rows.dtype))).double()
    image = image + _SHIFT * image.norm(dim=0).max() * carried64
    image = image / image.norm(dim=0)
    factor, failed = torch.linalg.cholesky_ex(image.T @ image)
    found = torch.linalg.solve_triangular(factor.T, image, upper=True, left=False)
    good = (failed == 0) & found.isfinite().all()
    return torch.where(good, found, carried64).to(carried.dtype)
