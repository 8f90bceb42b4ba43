"""Triton twins of ``subspace.encode`` and ``subspace.decode``: one launch each, z read once.

The root mean squares of the columns come from torch.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.kernels.tiles import ceil_div, power_of_2
from pamm.subspace import COARSE, FINE, code_bytes, column_rms

_ROWS = 32
_BLOCK = 64
_AT_ONCE = 1024
"""Bytes of codes that a program encodes."""


@triton.jit
def _plane(z_ptr, rms_ptr, row, present, first, byte, side, each, count, k):
    """The numbers at one place of the bytes, in units of their column; 0 where there are none."""
    offset = byte + side * each
    inside = (byte < each) & (offset < count)
    rms = tl.load(rms_ptr + first + offset, mask=inside, other=0.0)
    inverse = tl.where(rms == 0, 0.0, 1.0 / tl.where(rms == 0, 1.0, rms))
    at = z_ptr + row[:, None] * k + (first + offset)[None, :]
    z = tl.load(at, mask=present[:, None] & inside[None, :], other=0.0)
    return z.to(tl.float32) * inverse[None, :]


@triton.jit
def _code(unit, inverse, byte, side, each, count, LEVELS: tl.constexpr, A_BYTE: tl.constexpr):
    """Codes of a plane, at their place in the bytes."""
    code = tl.floor(unit * inverse[:, None] + LEVELS / 2)
    code = tl.where(code == code, code, 0.0)  # NaN: the size tells
    code = tl.minimum(tl.maximum(code, 0.0), LEVELS - 1.0).to(tl.uint8)
    inside = byte + side * each < count
    return tl.where(inside[None, :], code, 0).to(tl.uint8) << (8 // A_BYTE * side)


@triton.jit
def _encode_part(
    z_ptr, rms_ptr, codes_ptr, size_ptr, row, present, first, count, k,
    STEP: tl.constexpr, LEVELS: tl.constexpr, A_BYTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and sizes of ``count`` columns from ``first`` on; pointers are to the part's."""
    each = tl.cdiv(count, A_BYTE)
    byte = tl.arange(0, BLOCK)
    one = _plane(z_ptr, rms_ptr, row, present, first, byte, 0, each, count, k)
    two = _plane(z_ptr, rms_ptr, row, present, first, byte, 1, each, count, k)
    square = tl.sum(one * one, 1) + tl.sum(two * two, 1)
    if A_BYTE == 4:
        three = _plane(z_ptr, rms_ptr, row, present, first, byte, 2, each, count, k)
        four = _plane(z_ptr, rms_ptr, row, present, first, byte, 3, each, count, k)
        square += tl.sum(three * three, 1) + tl.sum(four * four, 1)
    size = (STEP * tl.sqrt_rn(square / tl.maximum(count, 1))).to(size_ptr.dtype.element_ty)
    tl.store(size_ptr, size, mask=present)
    wide = size.to(tl.float32)
    inverse = tl.where(wide == 0, 0.0, 1.0 / tl.where(wide == 0, 1.0, wide))
    packed = _code(one, inverse, byte, 0, each, count, LEVELS, A_BYTE)
    packed |= _code(two, inverse, byte, 1, each, count, LEVELS, A_BYTE)
    if A_BYTE == 4:
        packed |= _code(three, inverse, byte, 2, each, count, LEVELS, A_BYTE)
        packed |= _code(four, inverse, byte, 3, each, count, LEVELS, A_BYTE)
    tl.store(codes_ptr + byte[None, :], packed, mask=present[:, None] & (byte < each)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _encode_kernel(
    z_ptr, rms_ptr, codes_ptr, size_ptr, scale_ptr, tokens, k, fine, width,
    STEP_F: tl.constexpr, LEVELS_F: tl.constexpr, A_BYTE_F: tl.constexpr, GAIN_F: tl.constexpr,
    STEP_C: tl.constexpr, LEVELS_C: tl.constexpr, A_BYTE_C: tl.constexpr, GAIN_C: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows; the first program also writes the scales."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < tokens
    codes_row = codes_ptr + row[:, None] * width
    _encode_part(
        z_ptr, rms_ptr, codes_row, size_ptr + row * 2, row, present, 0, fine, k,
        STEP_F, LEVELS_F, A_BYTE_F, BLOCK,
    )  # fmt: skip
    _encode_part(
        z_ptr, rms_ptr, codes_row + tl.cdiv(fine, A_BYTE_F), size_ptr + row * 2 + 1, row, present,
        fine, k - fine, k, STEP_C, LEVELS_C, A_BYTE_C, BLOCK,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        for start in range(0, k, BLOCK):
            column = start + tl.arange(0, BLOCK)
            rms = tl.load(rms_ptr + column, mask=column < k, other=0.0)
            scale = rms * tl.where(column < fine, GAIN_F, GAIN_C)
            tl.store(scale_ptr + column, scale, mask=column < k)


@triton.jit
def _decode_part(
    codes_ptr, size_ptr, z_ptr, row, present, first, count, k,
    LEVELS: tl.constexpr, A_BYTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    size = tl.load(size_ptr, mask=present, other=0.0).to(tl.float32)
    each = tl.cdiv(count, A_BYTE)
    for start in range(0, each, BLOCK):
        byte = start + tl.arange(0, BLOCK)
        packed = tl.load(
            codes_ptr + byte[None, :], mask=present[:, None] & (byte < each)[None, :], other=0
        )
        for side in tl.static_range(A_BYTE):
            offset = byte + side * each
            inside = (byte < each) & (offset < count)
            code = (packed >> (8 // A_BYTE * side)) & (LEVELS - 1)
            value = (code.to(tl.float32) - (LEVELS - 1) / 2) * size[:, None]
            tl.store(
                z_ptr + row[:, None] * k + (first + offset)[None, :],
                value.to(z_ptr.dtype.element_ty), mask=present[:, None] & inside[None, :],
            )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _decode_kernel(
    codes_ptr, size_ptr, z_ptr, tokens, k, fine, width,
    LEVELS_F: tl.constexpr, A_BYTE_F: tl.constexpr, LEVELS_C: tl.constexpr, A_BYTE_C: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < tokens
    codes_row = codes_ptr + row[:, None] * width
    _decode_part(
        codes_row, size_ptr + row * 2, z_ptr, row, present, 0, fine, k,
        LEVELS_F, A_BYTE_F, BLOCK,
    )  # fmt: skip
    _decode_part(
        codes_row + tl.cdiv(fine, A_BYTE_F), size_ptr + row * 2 + 1, z_ptr, row, present,
        fine, k - fine, k, LEVELS_C, A_BYTE_C, BLOCK,
    )  # fmt: skip


def encode(z: Tensor, fine: int) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of ``subspace.encode``, for contiguous z in fp32, bf16 and fp16."""
    tokens, k = z.shape
    width = code_bytes(fine, k)
    codes = torch.empty(tokens, width, dtype=torch.uint8, device=z.device)
    size = torch.empty(tokens, 2, dtype=z.dtype, device=z.device)
    rms = column_rms(z)
    if tokens == 0:
        return codes, size, rms
    scale = torch.empty_like(rms)
    block = power_of_2(max(16, ceil_div(fine, FINE.a_byte), ceil_div(k - fine, COARSE.a_byte)))
    rows = max(1, _AT_ONCE // block)
    _encode_kernel[(ceil_div(tokens, rows),)](
        z, rms, codes, size, scale, tokens, k, fine, width,
        STEP_F=FINE.step, LEVELS_F=FINE.levels, A_BYTE_F=FINE.a_byte, GAIN_F=FINE.gain,
        STEP_C=COARSE.step, LEVELS_C=COARSE.levels, A_BYTE_C=COARSE.a_byte, GAIN_C=COARSE.gain,
        ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return codes, size, scale


def decode(codes: Tensor, size: Tensor, fine: int, k: int) -> Tensor:
    """The twin of ``subspace.decode``."""
    tokens, width = codes.shape
    z = torch.empty(tokens, k, dtype=size.dtype, device=codes.device)
    if tokens:
        _decode_kernel[(ceil_div(tokens, _ROWS),)](
            codes, size, z, tokens, k, fine, width,
            LEVELS_F=FINE.levels, A_BYTE_F=FINE.a_byte,
            LEVELS_C=COARSE.levels, A_BYTE_C=COARSE.a_byte, ROWS=_ROWS, BLOCK=_BLOCK,
        )  # fmt: skip
    return z
