"""Triton twin of ``sampling.draw``: two launches, G read once.

The first takes the sizes of the tokens' gradients. The second is one program, which looks for tau,
walks along the shares and writes down the tokens that a step falls on.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.kernels.tiles import ceil_div
from pamm.sampling import FLOOR, ROUNDS, TINY, UNIT

_ROWS = 4
_COLUMNS = 512
_TOKENS = 4096


@triton.jit(do_not_specialize=["tokens"])
def _size_kernel(
    g_ptr, size_ptr, tokens, m, stride_row, stride_col,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """||g_i|| of some tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < tokens
    square = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, m, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        at = g_ptr + row[:, None] * stride_row + column[None, :] * stride_col
        mask = present[:, None] & (column < m)[None, :]
        value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        square += value * value
    tl.store(size_ptr + row, tl.sqrt_rn(tl.sum(square, 1)), mask=present)


@triton.jit(do_not_specialize=["tokens", "c"])
def _select_kernel(
    size_ptr, offset_ptr, index_ptr, weight_ptr, tokens, c,
    ROUNDS: tl.constexpr, FLOOR: tl.constexpr, TINY: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``shares`` and ``drawn``, one program."""
    lane = tl.arange(0, BLOCK)
    total = 0.0
    for start in range(0, tokens, BLOCK):
        token = start + lane
        total += tl.sum(tl.load(size_ptr + token, mask=token < tokens, other=0.0), 0)
    floor = FLOOR * (total / tokens) + TINY
    tau = (total + floor * tokens) / c
    for _ in range(ROUNDS):
        rest = 0.0
        sure = 0
        for start in range(0, tokens, BLOCK):
            token = start + lane
            size = tl.load(size_ptr + token, mask=token < tokens, other=0.0) + floor
            is_sure = (size > tau) & (token < tokens)
            sure += tl.sum(is_sure.to(tl.int32), 0)
            rest += tl.sum(tl.where(is_sure | (token >= tokens), 0.0, size), 0)
        tau = rest / tl.maximum(c - sure, 1)

    units_all = tl.zeros((), tl.int64)
    for start in range(0, tokens, BLOCK):
        units_all += tl.sum(_units(size_ptr, start + lane, tokens, floor, tau, UNIT), 0)
    begin = (tl.load(offset_ptr) * units_all.to(tl.float64)).to(tl.int64)
    step = units_all.to(tl.float32) / c
    units_all = tl.maximum(units_all, 1)
    along = tl.zeros((), tl.int64)
    for start in range(0, tokens, BLOCK):
        token = start + lane
        units = _units(size_ptr, token, tokens, floor, tau, UNIT)
        high = along + tl.cumsum(units, 0)
        # Draws s with high - units <= (s * all + begin) // c < high.
        first = _ceil_div((high - units) * c - begin, units_all)
        count = _ceil_div(high * c - begin, units_all) - first
        weight = tl.div_rn(step, tl.maximum(units, 1).to(tl.float32))
        for ahead in range(0, tl.max(count, 0)):
            slot = first + ahead
            mask = (ahead < count) & (slot < c)
            tl.store(index_ptr + slot, token.to(tl.int64), mask=mask)
            tl.store(weight_ptr + slot, weight, mask=mask)
        along += tl.sum(units, 0)


@triton.jit
def _units(size_ptr, token, tokens, floor, tau, UNIT: tl.constexpr):
    """The share of each token; none where sizes are not finite."""
    size = tl.load(size_ptr + token, mask=token < tokens, other=0.0) + floor
    size = tl.where(tau < 3e38, tl.where(token < tokens, size, 0.0), 0.0)  # NaN is not less
    share = tl.minimum(tl.div_rn(size, tl.where(tau < 3e38, tau, 1.0)), 1.0)
    return (share * UNIT).to(tl.int64)


@triton.jit
def _ceil_div(a, b):
    """For a above -b and b above 0."""
    return (a + b - 1) // b


def draw(g: Tensor, c: int, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of ``sampling.draw``, for fp32, bf16 and fp16."""
    tokens, m = g.shape
    size = torch.empty(tokens, dtype=torch.float32, device=g.device)
    _size_kernel[(ceil_div(tokens, _ROWS),)](
        g, size, tokens, m, g.stride(0), g.stride(1), ROWS=_ROWS, BLOCK=_COLUMNS
    )
    # Where gradients are not finite no token is drawn, and the weights tell.
    index = torch.zeros(c, dtype=torch.int64, device=g.device)
    weight = torch.full((c,), float("nan"), dtype=torch.float32, device=g.device)
    _select_kernel[(1,)](
        size, offset, index, weight, tokens, c,
        ROUNDS=ROUNDS, FLOOR=FLOOR, TINY=TINY, UNIT=UNIT, BLOCK=_TOKENS, num_warps=16,
    )  # fmt: skip
    return index, weight
