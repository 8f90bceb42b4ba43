"""Triton twins of ``subspace.encode`` and ``subspace.decode``: one launch each.

The norms of the columns come from torch; a program encodes some rows, which it reads twice: for
their sizes, then for the codes.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.kernels.tiles import ceil_div
from pamm.subspace import COARSE, FINE, code_bytes

_ROWS = 32
_BLOCK = 64


@triton.jit
def _units(z_ptr, norm_ptr, row, column, inside, k, root):
    """z_ij / s_j of some rows and columns; 0 outside."""
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    inverse = tl.where(norm == 0, 0.0, root / tl.where(norm == 0, 1.0, norm))
    at = z_ptr + row[:, None] * k + column[None, :]
    return tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32) * inverse[None, :]


@triton.jit
def _encode_part(
    z_ptr, norm_ptr, codes_ptr, size_ptr, row, present, first, count, k, root,
    STEP: tl.constexpr, LEVELS: tl.constexpr, A_BYTE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and sizes of ``count`` columns from ``first`` on; pointers are to the part's."""
    square = tl.zeros((ROWS,), tl.float32)
    for start in range(0, count, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        unit = _units(z_ptr, norm_ptr, row, first + offset, offset < count, k, root)
        square += tl.sum(unit * unit, 1)
    size = (STEP * tl.sqrt_rn(square / tl.maximum(count, 1))).to(size_ptr.dtype.element_ty)
    tl.store(size_ptr, size, mask=present)
    wide = size.to(tl.float32)
    inverse = tl.where(wide == 0, 0.0, 1.0 / tl.where(wide == 0, 1.0, wide))
    each = tl.cdiv(count, A_BYTE)
    for start in range(0, each, BLOCK):
        byte = start + tl.arange(0, BLOCK)
        packed = tl.zeros((ROWS, BLOCK), tl.uint8)
        for side in tl.static_range(A_BYTE):
            offset = byte + side * each
            inside = (byte < each) & (offset < count)
            unit = _units(z_ptr, norm_ptr, row, first + offset, inside, k, root)
            code = tl.floor(unit * inverse[:, None] + LEVELS / 2)
            code = tl.where(code == code, code, 0.0)  # NaN: the size tells
            code = tl.minimum(tl.maximum(code, 0.0), LEVELS - 1.0).to(tl.uint8)
            packed |= tl.where(inside[None, :], code, 0).to(tl.uint8) << (8 // A_BYTE * side)
        mask = present[:, None] & (byte < each)[None, :]
        tl.store(codes_ptr + byte[None, :], packed, mask=mask)


@triton.jit(do_not_specialize=["tokens", "root"])
def _encode_kernel(
    z_ptr, norm_ptr, codes_ptr, size_ptr, scale_ptr, tokens, k, fine, width, root,
    STEP_F: tl.constexpr, LEVELS_F: tl.constexpr, A_BYTE_F: tl.constexpr, GAIN_F: tl.constexpr,
    STEP_C: tl.constexpr, LEVELS_C: tl.constexpr, A_BYTE_C: tl.constexpr, GAIN_C: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows; the first program also writes the scales."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < tokens
    row = tl.minimum(row, tokens - 1)
    codes_row = codes_ptr + row[:, None] * width
    _encode_part(
        z_ptr, norm_ptr, codes_row, size_ptr + row * 2, row, present, 0, fine, k, root,
        STEP_F, LEVELS_F, A_BYTE_F, ROWS, BLOCK,
    )  # fmt: skip
    _encode_part(
        z_ptr, norm_ptr, codes_row + tl.cdiv(fine, A_BYTE_F), size_ptr + row * 2 + 1, row, present,
        fine, k - fine, k, root, STEP_C, LEVELS_C, A_BYTE_C, ROWS, BLOCK,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        for start in range(0, k, BLOCK):
            column = start + tl.arange(0, BLOCK)
            norm = tl.load(norm_ptr + column, mask=column < k, other=0.0)
            scale = norm / root * tl.where(column < fine, GAIN_F, GAIN_C)
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
    norm = torch.linalg.vector_norm(z, dim=0, dtype=torch.float32)
    if tokens == 0:
        return codes, size, norm
    scale = torch.empty_like(norm)
    _encode_kernel[(ceil_div(tokens, _ROWS),)](
        z, norm, codes, size, scale, tokens, k, fine, width, tokens**0.5,
        STEP_F=FINE.step, LEVELS_F=FINE.levels, A_BYTE_F=FINE.a_byte, GAIN_F=FINE.gain,
        STEP_C=COARSE.step, LEVELS_C=COARSE.levels, A_BYTE_C=COARSE.a_byte, GAIN_C=COARSE.gain,
        ROWS=_ROWS, BLOCK=_BLOCK,
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
