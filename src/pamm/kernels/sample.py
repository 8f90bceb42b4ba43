"""Triton twin of ``sampling.draw`` and ``sampling.rows``: two launches, three with directions; and
of ``fp8.units``, in the draw.

The first looks for tau, walks along the shares and writes down the tokens that a step falls on. The
second takes their rows; with directions, only those of G, and the third takes those of X, less what
lies in the directions.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.fp8 import LARGEST, MARGIN, room_for_units
from pamm.kernels.tiles import ceil_div, operand, power_of_2, precision
from pamm.sampling import FLOOR, ROUNDS, TINY, UNIT, Whole, padded

_ROWS = 4
_COLUMNS = 512
_TOKENS = 8192  # that a program sees at a time
_OWN = 2048  # of which it writes down the draws
_EVEN = 16  # of such multiples the compiler knows
_REST_ROWS = 64
_REST_COLUMNS = 128


@triton.jit(do_not_specialize=["tokens", "c"])
def _draw_kernel(
    size_ptr, offset_ptr, most_ptr, index_ptr, weight_ptr, units_ptr, tokens, c, apart,
    ROUNDS: tl.constexpr, FLOOR: tl.constexpr, TINY: tl.constexpr, UNIT: tl.constexpr,
    MARGIN: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """``shares`` and ``drawn``. Every program finds tau for itself, which takes less time than to
    wait for another's, and writes down the draws of its own tokens. Sums are taken lane by lane
    until the end of a pass: nothing waits for all lanes more than once in it. A program behind
    them, if there is one, writes down ``fp8.units``."""
    lane = tl.arange(0, BLOCK)
    sizes = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tokens, BLOCK):
        sizes += tl.load(size_ptr + start + lane, mask=start + lane < tokens, other=0.0)
    total = tl.sum(sizes, 0)
    if tl.program_id(0) * OWN >= tokens:
        most, longest = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, tokens, BLOCK):
            present = start + lane < tokens
            most = _larger(most, tl.load(most_ptr + start + lane, mask=present, other=0.0))
            size = tl.load(size_ptr + start + lane, mask=present, other=0.0)
            longest = _larger(longest, size)
        weighted = _larger(tl.reduce(longest, 0, _larger), (1 + 2 * FLOOR) * total / c)
        most_of_all = tl.reduce(most, 0, _larger)
        tl.store(units_ptr, _larger(most_of_all * (MARGIN / LARGEST), TINY))
        tl.store(units_ptr + apart, _larger(weighted / LARGEST, TINY))
        return
    floor = FLOOR * (total / tokens) + TINY
    tau = (total + floor * tokens) / c
    for _ in range(ROUNDS):
        rest = tl.zeros((BLOCK,), tl.float32)
        sure = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, tokens, BLOCK):
            present = start + lane < tokens
            size = tl.load(size_ptr + start + lane, mask=present, other=0.0) + floor
            is_sure = (size > tau) & present
            sure += is_sure.to(tl.int32)
            rest += tl.where(is_sure | ~present, 0.0, size)
        tau = tl.sum(rest, 0) / tl.maximum(c - tl.sum(sure, 0), 1)

    own = tl.program_id(0) * OWN
    units = tl.zeros((BLOCK,), tl.int64)
    units_before = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, tokens, BLOCK):
        here = _units(size_ptr, start + lane, tokens, floor, tau, UNIT)
        units += here
        units_before += tl.where(start + lane < own, here, 0)
    all_units = tl.sum(units, 0)
    draws_a_unit = c.to(tl.float64) / all_units.to(tl.float64)
    offset = tl.load(offset_ptr)
    # Where gradients are not finite all draws are of the first token, and the weights tell.
    step = tl.where(tau < 3e38, all_units.to(tl.float32) / c, float("nan"))
    token = own + tl.arange(0, OWN)
    here = _units(size_ptr, token, tokens, floor, tau, UNIT)
    along = tl.sum(units_before, 0) + tl.cumsum(here, 0)
    first = _draws(along - here, all_units, draws_a_unit, offset, c)
    count = _draws(along, all_units, draws_a_unit, offset, c) - first
    weight = tl.div_rn(step, tl.maximum(here, 1).to(tl.float32))
    for ahead in range(0, tl.max(count, 0)):
        tl.store(index_ptr + first + ahead, token.to(tl.int64), mask=ahead < count)
        tl.store(weight_ptr + first + ahead, weight, mask=ahead < count)


@triton.jit
def _larger(one, two):
    """NaN if one of them is."""
    return tl.maximum(one, two, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _units(size_ptr, token, tokens, floor, tau, UNIT: tl.constexpr):
    """The share of each token; all to the first one where sizes are not finite."""
    size = tl.load(size_ptr + token, mask=token < tokens, other=0.0) + floor
    size = tl.where(tau < 3e38, tl.where(token < tokens, size, 0.0), 0.0)  # NaN is not less
    share = tl.minimum(tl.div_rn(size, tl.where(tau < 3e38, tau, 1.0)), 1.0)
    units = (share * UNIT).to(tl.int64)
    return tl.where(tau < 3e38, units, (token == 0).to(tl.int64))


@triton.jit
def _draws(along, all_units, draws_a_unit, offset, c):
    """How many are drawn up to here: at the end c, also where the product is rounded up past it."""
    draws = tl.ceil(along.to(tl.float64) * draws_a_unit - offset).to(tl.int64)
    return tl.where(along == all_units, c, draws)


@triton.jit(do_not_specialize=["c"])
def _rows_kernel(
    x_ptr, g_ptr, index_ptr, weight_ptr, x_rows_ptr, g_rows_ptr, c, n, n_even, m, m_even,
    x_row, x_col, g_row, g_col, x_pitch, g_pitch,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Some of the drawn rows, with n columns of X and m of G, which are weighted."""
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = (slot < c)[:, None]
    token = tl.load(index_ptr + slot, mask=slot < c, other=0)[:, None]
    weight = tl.load(weight_ptr + slot, mask=slot < c, other=0.0)[:, None]
    x_at, x_to = x_ptr + token * x_row, x_rows_ptr + slot[:, None] * x_pitch
    for start in range(0, n_even, BLOCK):
        _copy(x_at, x_to, start, BLOCK, present, n_even, n_even, x_col, None)
    if n > 0:
        _copy(x_at, x_to, n_even, TAIL, present, n, x_pitch, x_col, None)
    g_at, g_to = g_ptr + token * g_row, g_rows_ptr + slot[:, None] * g_pitch
    for start in range(0, m_even, BLOCK):
        _copy(g_at, g_to, start, BLOCK, present, m_even, m_even, g_col, weight)
    _copy(g_at, g_to, m_even, TAIL, present, m, g_pitch, g_col, weight)


@triton.jit
def _copy(at, to, start, BLOCK: tl.constexpr, present, end, to_end, stride, weight):
    """Columns from ``start``, times the weight if there is one; zeros from ``end`` to ``to_end``.

    Where both ends are known multiples of 16 the compiler moves 16 bytes at a time."""
    column = (start + tl.arange(0, BLOCK).to(tl.int64))[None, :]
    value = tl.load(at + column * stride, mask=present & (column < end), other=0.0)
    if weight is not None:
        value = value.to(tl.float32) * weight
    tl.store(to + column, value.to(to.dtype.element_ty), mask=present & (column < to_end))


@triton.jit
def in_directions(
    z_ptr, basis_ptr, token, present, column, inside, k,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """P z of some tokens, in some columns: (ROWS, BLOCK) in fp32."""
    known = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, k, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        z = tl.load(
            z_ptr + token[:, None] * k + j[None, :],
            mask=present[:, None] & (j < k)[None, :], other=0.0,
        )  # fmt: skip
        basis = tl.load(
            basis_ptr + column[:, None] * k + j[None, :],
            mask=inside[:, None] & (j < k)[None, :], other=0.0,
        )  # fmt: skip
        known = tl.dot(z.to(OPERAND), tl.trans(basis).to(OPERAND), known, input_precision=PRECISION)
    return known


@triton.jit(do_not_specialize=["c"])
def _rest_kernel(
    x_ptr, z_ptr, basis_ptr, inner_ptr, index_ptr, x_rows_ptr, g_rows_ptr,
    c, n, m, k, x_row, x_col, inner_row, x_pitch, g_pitch,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """For some rows and columns, x - P z, or, in the first programs, P.T and z.T @ G."""
    first = tl.cdiv(k, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, ROWS).to(tl.int64)
    if tl.program_id(0) < first:
        j = tl.program_id(0) * ROWS + lane
        present, row = (j < k)[:, None], c + j[:, None]
        at, to = basis_ptr + column[None, :] * k + j[:, None], x_rows_ptr + row * x_pitch
        value = tl.load(at, mask=present & (column < n)[None, :], other=0.0)
        mask = present & (column < x_pitch)[None, :]
        tl.store(to + column[None, :], value.to(x_rows_ptr.dtype.element_ty), mask=mask)
        at, to = inner_ptr + j[:, None] * inner_row, g_rows_ptr + row * g_pitch
        value = tl.load(at + column[None, :], mask=present & (column < m)[None, :], other=0.0)
        tl.store(to + column[None, :], value, mask=present & (column < g_pitch)[None, :])
    elif tl.program_id(1) * BLOCK < x_pitch:
        slot = (tl.program_id(0) - first) * ROWS + lane
        present, inside = slot < c, column < n
        token = tl.load(index_ptr + slot, mask=present, other=0)
        known = in_directions(
            z_ptr, basis_ptr, token, present, column, inside, k,
            PRECISION, OPERAND, ROWS, BLOCK, BLOCK_K,
        )  # fmt: skip
        mask = present[:, None] & inside[None, :]
        at = x_ptr + token[:, None] * x_row + column[None, :] * x_col
        rest = tl.load(at, mask=mask, other=0.0).to(tl.float32) - known
        at = x_rows_ptr + slot[:, None] * x_pitch + column[None, :]
        mask = present[:, None] & (column < x_pitch)[None, :]
        tl.store(at, rest.to(x_rows_ptr.dtype.element_ty), mask=mask)


def draw(size: Tensor, c: int, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of ``sampling.draw``, for fp32."""
    return _draw(size, c, offset, None)[:2]


def draw_with_units(
    size: Tensor, c: int, offset: Tensor, most: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of ``sampling.draw`` and ``fp8.units`` in one, for fp32."""
    return _draw(size, c, offset, most)


def _draw(
    size: Tensor, c: int, offset: Tensor, most: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = len(size)
    index = torch.empty(c, dtype=torch.int64, device=size.device)
    weight = torch.empty(c, dtype=torch.float32, device=size.device)
    units = room_for_units(size)
    _draw_kernel[(ceil_div(tokens, _OWN) + (most is not None),)](
        size, offset, size if most is None else most, index, weight, units,
        tokens, c, units.stride(0),
        ROUNDS=ROUNDS, FLOOR=FLOOR, TINY=TINY, UNIT=UNIT, MARGIN=MARGIN, LARGEST=LARGEST,
        BLOCK=_TOKENS, OWN=_OWN, num_warps=32, enable_fp_fusion=False,
    )  # fmt: skip
    return index, weight, units


def rows(
    x: Tensor, g: Tensor, index: Tensor, weight: Tensor, whole: Whole | None = None
) -> tuple[Tensor, Tensor]:
    """The twin of ``sampling.rows``."""
    (c,), n, m = index.shape, x.shape[1], g.shape[1]
    k = 0 if whole is None else whole.basis.shape[1]
    x_rows, g_rows = g.new_empty(c + k, padded(n)), g.new_empty(c + k, padded(m))
    x_columns = 0 if k else n
    _rows_kernel[(ceil_div(c, _ROWS),)](
        x, g, index, weight, x_rows, g_rows, c,
        x_columns, x_columns // _EVEN * _EVEN, m, m // _EVEN * _EVEN,
        *x.stride(), *g.stride(), x_rows.stride(0), g_rows.stride(0),
        ROWS=_ROWS, BLOCK=_COLUMNS, TAIL=padded(1),
    )  # fmt: skip
    if whole is not None:
        z, basis = whole.z.contiguous(), whole.basis.contiguous()
        inner = whole.inner if whole.inner.stride(1) == 1 else whole.inner.contiguous()
        programs = ceil_div(k, _REST_ROWS) + ceil_div(c, _REST_ROWS)
        _rest_kernel[(programs, ceil_div(max(padded(n), padded(m)), _REST_COLUMNS))](
            x, z, basis, inner, index, x_rows, g_rows, c, n, m, k,
            *x.stride(), inner.stride(0), x_rows.stride(0), g_rows.stride(0),
            PRECISION=precision(x.dtype), OPERAND=operand(x.dtype),
            ROWS=_REST_ROWS, BLOCK=_REST_COLUMNS, BLOCK_K=min(64, max(16, power_of_2(k))),
        )  # fmt: skip
    return x_rows, g_rows
