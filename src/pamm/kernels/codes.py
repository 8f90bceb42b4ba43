"""Triton twins of ``subspace.encode`` and ``subspace.decode``.

Encoding reads z twice: for the largest size in each column, then for codes and packing. Decoding
is one launch.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.kernels.tiles import ceil_div, power_of_2
from pamm.permutation import GOLDEN

_ROWS = 64
_PARTS = 64  # of the tokens, in the search for the largest


@triton.jit
def _mix(x):
    """``permutation.mix`` in 32 bits."""
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit(do_not_specialize=["tokens", "each"])
def _size_kernel(
    z_ptr, size_ptr, tokens, k, each, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest size in each column, which no order of programs changes."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1).to(tl.int64)
    inside = column < k
    size = tl.zeros((BLOCK,), tl.float32)
    end = tl.minimum((part + 1) * each, tokens)
    for start in range(part * each, end, ROWS):
        row = start + tl.arange(0, ROWS)
        z = tl.load(
            z_ptr + row[:, None] * k + column[None, :],
            mask=(row < end)[:, None] & inside[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        # A maximum would lose NaN, infinity it keeps.
        size = tl.maximum(size, tl.max(tl.where(z != z, float("inf"), tl.abs(z)), 0))
    tl.atomic_max(size_ptr + column, size, mask=inside)


@triton.jit(do_not_specialize=["tokens", "drawn"])
def _encode_kernel(
    z_ptr, size_ptr, drawn_ptr, codes_ptr, scale_ptr,
    tokens, k, half, drawn,
    GOLDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of columns j and j + half, in one byte."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.load(drawn_ptr).to(tl.uint32)
    last = tl.load(drawn_ptr + drawn - 1).to(tl.uint32)
    key = _mix((first * GOLDEN) ^ _mix(last))
    place = (row[:, None] * half + column[None, :]).to(tl.uint32)
    word = _mix(place ^ key)
    packed = tl.zeros((ROWS, BLOCK), tl.uint8)
    for side in tl.static_range(2):
        at = column + side * half
        inside = (column < half) & (at < k)
        scale = tl.load(size_ptr + at, mask=inside, other=0.0) / 7.5
        z = tl.load(
            z_ptr + row[:, None] * k + at[None, :],
            mask=(row < tokens)[:, None] & inside[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        z = tl.where(tl.abs(z) < float("inf"), z, 0.0)  # the scale tells
        inverse = tl.where(scale == 0, 0.0, 1.0 / tl.where(scale == 0, 1.0, scale))
        uniform = ((word >> (16 * side)) & 0xFFFF).to(tl.float32) / 65536
        code = tl.floor(z * inverse[None, :] + 7.5 + uniform)
        code = tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.uint8)
        code = tl.where(inside[None, :], code, 0)
        packed |= code << (4 * side)
        if tl.program_id(1) == 0:
            tl.store(scale_ptr + at, scale, mask=inside)
    mask = (row < tokens)[:, None] & (column < half)[None, :]
    tl.store(codes_ptr + row[:, None] * half + column[None, :], packed, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _decode_kernel(
    codes_ptr, z_ptr, tokens, k, half, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = (row < tokens)[:, None] & (column < half)[None, :]
    packed = tl.load(codes_ptr + row[:, None] * half + column[None, :], mask=present, other=0)
    at = z_ptr + row[:, None] * k + column[None, :]
    low = (packed & 15).to(tl.float32) - 7.5
    tl.store(at, low.to(z_ptr.dtype.element_ty), mask=present)
    high = (packed >> 4).to(tl.float32) - 7.5
    present = present & (column + half < k)[None, :]
    tl.store(at + half, high.to(z_ptr.dtype.element_ty), mask=present)


def encode(z: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of ``subspace.encode``, for contiguous z in fp32, bf16 and fp16."""
    tokens, k = z.shape
    half = ceil_div(k, 2)
    codes = torch.empty(tokens, half, dtype=torch.uint8, device=z.device)
    scale = torch.empty(k, dtype=torch.float32, device=z.device)
    if tokens == 0:
        return codes, scale.zero_()
    size = torch.zeros(k, dtype=torch.float32, device=z.device)
    block = min(128, max(16, power_of_2(k)))
    each = ceil_div(ceil_div(tokens, _PARTS), _ROWS) * _ROWS
    _size_kernel[(ceil_div(k, block), _PARTS)](z, size, tokens, k, each, ROWS=_ROWS, BLOCK=block)
    block = min(64, max(16, power_of_2(half)))
    _encode_kernel[(ceil_div(half, block), ceil_div(tokens, _ROWS))](
        z, size, drawn, codes, scale, tokens, k, half, len(drawn),
        GOLDEN=GOLDEN, ROWS=_ROWS, BLOCK=block,
    )  # fmt: skip
    return codes, scale


def decode(codes: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The twin of ``subspace.decode``."""
    tokens, half = codes.shape
    z = torch.empty(tokens, k, dtype=dtype, device=codes.device)
    if tokens:
        block = min(64, max(16, power_of_2(half)))
        _decode_kernel[(ceil_div(half, block), ceil_div(tokens, _ROWS))](
            codes, z, tokens, k, half, ROWS=_ROWS, BLOCK=block
        )
    return z
