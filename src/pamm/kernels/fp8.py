"""Triton twin of ``fp8.rows``: one launch takes the drawn rows, rounds them to 8 bits and lays them
as columns.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.fp8 import DTYPE, Rows, padded, rounded
from pamm.kernels.sample import draw_with_units as draw_with_units
from pamm.kernels.sample import in_directions
from pamm.kernels.tiles import ceil_div, interpreted, operand, power_of_2, precision
from pamm.sampling import Whole
from pamm.sampling import padded as padded_columns

_SLOTS = 128
_COLUMNS = padded_columns(1)  # so that the last program ends with the padding


@triton.jit(do_not_specialize=["c"])
def _rows_kernel(
    x_ptr, g_ptr, z_ptr, basis_ptr, index_ptr, weight_ptr, units_ptr, x_rows_ptr, g_rows_ptr,
    c, n, m, k, pitch, apart, x_row, x_col, g_row, g_col,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some of the drawn rows in some columns of X, less P z if there is a k, or, in the programs
    behind those, of G."""
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    present = slot < c
    token = tl.load(index_ptr + slot, mask=present, other=0)
    x_blocks = tl.cdiv(n, BLOCK)
    if tl.program_id(1) < x_blocks:
        column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = present[:, None] & (column < n)[None, :]
        at = x_ptr + token[:, None] * x_row + column[None, :] * x_col
        value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if BLOCK_K > 0:
            value -= in_directions(
                z_ptr, basis_ptr, token, present, column, column < n, k,
                PRECISION, OPERAND, SLOTS, BLOCK, BLOCK_K,
            )  # fmt: skip
        value *= tl.div_rn(1.0, tl.load(units_ptr))
        to = x_rows_ptr
    else:
        column = (tl.program_id(1) - x_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(weight_ptr + slot, mask=present, other=0.0)
        weight = tl.div_rn(weight, tl.load(units_ptr + apart))
        mask = present[:, None] & (column < m)[None, :]
        at = g_ptr + token[:, None] * g_row + column[None, :] * g_col
        value = tl.load(at, mask=mask, other=0.0).to(tl.float32) * weight[:, None]
        to = g_rows_ptr
    at = to + column[None, :] * pitch + slot[:, None]
    tl.store(at, value.to(to.dtype.element_ty), mask=(slot < pitch)[:, None])


def rows(
    x: Tensor, g: Tensor, index: Tensor, weight: Tensor, units: Tensor, whole: Whole | None = None
) -> Rows:
    """The twin of ``fp8.rows``."""
    (c,), n, m = index.shape, x.shape[1], g.shape[1]
    k = 0 if whole is None else whole.basis.shape[1]
    z, basis = (x, x) if whole is None else (whole.z.contiguous(), whole.basis.contiguous())
    # The interpreter does not round to 8 bits as a GPU does: to the nearest, and no further than
    # the last.
    dtype = torch.float32 if interpreted() else DTYPE
    x_rows = torch.empty(padded_columns(n), padded(c), dtype=dtype, device=x.device)
    g_rows = torch.empty(padded_columns(m), padded(c), dtype=dtype, device=g.device)
    _rows_kernel[(ceil_div(padded(c), _SLOTS), ceil_div(n, _COLUMNS) + ceil_div(m, _COLUMNS))](
        x, g, z, basis, index, weight, units, x_rows, g_rows,
        c, n, m, k, padded(c), units.stride(0), *x.stride(), *g.stride(),
        PRECISION=precision(x.dtype), OPERAND=operand(x.dtype),
        SLOTS=_SLOTS, BLOCK=_COLUMNS, BLOCK_K=min(64, max(16, power_of_2(k))) if k else 0,
    )  # fmt: skip
    if interpreted():
        x_rows, g_rows = rounded(x_rows), rounded(g_rows)
    return Rows(x_rows, g_rows, units)
