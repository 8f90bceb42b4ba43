"""The subspace method in plain PyTorch: X on some directions, in 4 and 2 bits a number.

X of shape (tokens, n) is kept as X Q, with k directions Q of length n in place of n features:

    Q     = [Q1, (I - Q1 Q1.T) E_J]         Q1 (n, k1): where most of X's energy lies, carried along
                                            E_J (n, k2): k2 of the n unit vectors, drawn anew
    dW.T ~= Q diag(w) ((X Q).T @ G)         w = 1 for Q1, n / k2 for the others

Over the draws of J the mean of (n / k2) E_J E_J.T is I, so that of Q diag(w) Q.T is
Q1 Q1.T + (I - Q1 Q1.T) = I: the gradient is unbiased, whatever Q1 is, but for rounding. Its noise
is what dW has outside of Q1, times about sqrt(n / k2).

The first directions of Q1 hold nearly all of the energy and get four bits, the others and those
drawn anew two. Every token has a size of its own for each of the two parts: what is rare is often
large, and a common range would cut it off.
"""

import dataclasses

import torch
from jaxtyping import Float, Integer, UInt8
from torch import Tensor

from pamm.types import accumulation_dtype


@dataclasses.dataclass(frozen=True)
class Code:
    """Numbers of spread 1 rounded to the nearest of ``levels``, ``step`` apart and around zero.

    For normal numbers z the mean of z times what it is rounded to is 1 / ``gain``; so what is
    rounded, times ``gain``, is right on the average. A byte holds ``a_byte`` of them.
    """

    levels: int
    step: float
    gain: float
    a_byte: int


FINE = Code(levels=16, step=0.4, gain=1.0025, a_byte=2)
COARSE = Code(levels=4, step=0.995, gain=1.1352, a_byte=4)
_MULTIPLE = 16  # the tensor cores' tile

FIRST, EVERY = 8, 64
"""Q1 is refreshed in each of the first passes, and then in every 64th."""
SAMPLE = 4096
"""About so many rows of X a refresh looks at, and a quarter of them the scales of the columns."""
_LEAST = 1e-3
"""Of the mean scale: what the sample missed is cut off, but not lost."""
_SHIFT = 1e-6  # of the largest: directions that X does not have stay as they are
_CHUNK = 1 << 20


def directions(ratio: float, n: int) -> tuple[int, int, int]:
    """Carried with four bits, carried with two, drawn anew: a third each of ``ratio`` n.

    In whole tiles where n has room for three; at least one is drawn anew.
    """
    third = max(_MULTIPLE, round(ratio * n / 3 / _MULTIPLE) * _MULTIPLE)
    third = min(third, n // 3)
    return third, third, max(1, third)


def code_bytes(fine: int, k: int) -> int:
    """Bytes of a token's k numbers, of which the first ``fine`` have four bits."""
    return -(-fine // FINE.a_byte) + -(-(k - fine) // COARSE.a_byte)


def basis(carried: Float[Tensor, "n k1"], drawn: Integer[Tensor, " k2"]) -> Float[Tensor, "n k"]:
    """Q = [Q1, (I - Q1 Q1.T) E_J]."""
    unit = carried.new_zeros(len(carried), len(drawn)).scatter_(0, drawn[None], 1.0)
    return torch.cat([carried, unit - carried @ carried[drawn].T], dim=1)


def stride(tokens: int, sample: int) -> int:
    """Of rows that stand for all: odd, so that they are not the same places of every sequence."""
    return max(1, tokens // sample) | 1


def encode(
    z: Float[Tensor, "tokens k"], fine: int
) -> tuple[UInt8[Tensor, "tokens bytes"], Float[Tensor, "tokens 2"], Float[Tensor, " k"]]:
    """z as codes c, a size for each token and part, and a scale for each column.

    z_ij ~ (c_ij - (levels - 1) / 2) size_i scale_j, to the nearest. The scale is s_j, the root mean
    square of a sample of the column, times the gain; the size is the root mean square of the
    token's z_ij / s_j, times the step. The first ``fine`` columns are one part, the others the
    other. Of the c columns of a part with p codes a byte, column j shares a byte with
    j + ceil(c / p) and so on, from the low bits up.
    """
    tokens, k = z.shape
    wide = accumulation_dtype(z.dtype)
    rms = column_rms(z)
    inverse = torch.where(rms == 0, 0, 1 / rms)
    codes = z.new_empty(tokens, code_bytes(fine, k), dtype=torch.uint8)
    size = z.new_zeros(tokens, 2)
    rows = max(1, _CHUNK // max(k, 1))
    for start in range(0, tokens, rows):
        part = slice(start, start + rows)
        unit = z[part].to(wide) * inverse
        packed = []
        for number, (columns, code) in enumerate(_parts(fine, k)):
            if unit[:, columns].numel():
                of_tokens = unit[:, columns].square().mean(1).sqrt()
                size[part, number] = (code.step * of_tokens).to(z.dtype)
            packed.append(_pack(unit[:, columns], size[part, number, None].to(wide), code))
        codes[part] = torch.cat(packed, dim=1)
    scale = torch.cat([rms[columns] * code.gain for columns, code in _parts(fine, k)])
    return codes, size, scale


def column_rms(z: Float[Tensor, "tokens k"]) -> Float[Tensor, " k"]:
    """Root mean square of each column, over a sample of the rows; in fp32 (fp64 for fp64)."""
    sample = z[:: stride(len(z), SAMPLE // 4)]
    norm = torch.linalg.vector_norm(sample, dim=0, dtype=accumulation_dtype(z.dtype))
    rms = norm / max(len(sample), 1) ** 0.5
    return torch.maximum(rms, _LEAST * rms.mean())


def decode(
    codes: UInt8[Tensor, "tokens bytes"], size: Float[Tensor, "tokens 2"], fine: int, k: int
) -> Float[Tensor, "tokens k"]:
    """(c - (levels - 1) / 2) size: what ``encode`` kept, in units of the scale."""
    split = -(-fine // FINE.a_byte)
    wide = accumulation_dtype(size.dtype)
    values = []
    for number, (part, (columns, code)) in enumerate(
        zip((codes[:, :split], codes[:, split:]), _parts(fine, k), strict=True)
    ):
        bits = 8 // code.a_byte
        planes = [(part >> (bits * side)) & (code.levels - 1) for side in range(code.a_byte)]
        c = torch.cat(planes, dim=1)[:, : columns.stop - columns.start].to(wide)
        values.append((c - (code.levels - 1) / 2) * size[:, number, None].to(wide))
    return torch.cat(values, dim=1).to(size.dtype)


def _parts(fine: int, k: int) -> tuple[tuple[slice, Code], tuple[slice, Code]]:
    return (slice(0, fine), FINE), (slice(fine, k), COARSE)


def _pack(unit: Tensor, size: Tensor, code: Code) -> Tensor:
    """Codes of one part, several in a byte."""
    c = torch.where(size == 0, 0, unit * (1 / size)) + code.levels / 2
    c = c.floor().clamp_(0, code.levels - 1).nan_to_num_().to(torch.uint8)
    each = -(-c.shape[1] // code.a_byte)
    planes = torch.nn.functional.pad(c, (0, each * code.a_byte - c.shape[1]))
    packed = planes.new_zeros(len(c), each)
    for side in range(code.a_byte):
        packed |= planes[:, side * each : (side + 1) * each] << (8 // code.a_byte * side)
    return packed


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
