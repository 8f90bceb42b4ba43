"""Triton twin of ``reference.approx_matmul``: two launches, G read once.

B~ = P.T @ G, with P the (tokens, k) matrix that holds alpha_i at (i, f(i)). P is built in
registers, tile by tile, and multiplied on the tensor cores; tokens are split over programs, each
of which writes a partial B~ of its own. The second launch adds the partials in a fixed order while
it computes dW = beta B~.T @ C. No atomics: the same bits at each run.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.kernels import sorted_sum
from pamm.kernels.tiles import (
    SORTED_ABOVE,
    ceil_div,
    operand,
    precision,
    splits,
    tile,
)
from pamm.types import Compressed


@triton.jit(do_not_specialize=["tokens", "k", "tokens_each"])
def _segment_sum_kernel(
    f_ptr, alpha_ptr, g_ptr, partial_ptr,
    tokens, m, k, stride_row, stride_col, tokens_each,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial[split] = P.T @ G over the tokens of one split, for one tile of k and of m."""
    split = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = column < m
    total = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    begin = split * tokens_each
    end = tl.minimum(begin + tokens_each, tokens)
    for start in range(begin, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        present = token < end
        f = tl.load(f_ptr + token, mask=present, other=0).to(tl.int32)
        alpha = tl.load(alpha_ptr + token, mask=present, other=0.0)
        g = tl.load(
            g_ptr + token[:, None] * stride_row + column[None, :] * stride_col,
            mask=present[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        p = tl.where(j[:, None] == f[None, :], alpha[None, :], 0.0)
        total = tl.dot(p.to(OPERAND), g.to(OPERAND), total, input_precision=PRECISION)
    where = (split * k + j[:, None]) * m + column[None, :]
    tl.store(partial_ptr + where, total, mask=(j < k)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["k", "parts"])
def _expand_kernel(
    partial_ptr, c_ptr, beta_ptr, w_ptr,
    m, n, k, parts,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dW = beta * (sum of the partials).T @ C, for one tile of (m, n)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    step = k.to(tl.int64) * m
    for first in range(0, k, BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        mask = (row < m)[:, None] & (j < k)[None, :]
        b = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        at = partial_ptr + j[None, :].to(tl.int64) * m + row[:, None]
        for start in range(0, parts, AT_ONCE):
            for ahead in tl.static_range(AT_ONCE):  # unrolled, to have several loads in flight
                b += tl.load(at, mask=mask & (start + ahead < parts), other=0.0)
                at += step
        c = tl.load(
            c_ptr + j[:, None].to(tl.int64) * n + column[None, :],
            mask=(j < k)[:, None] & (column < n)[None, :], other=0.0,
        )  # fmt: skip
        # In fp16 a sum over many tokens can overflow, in tf32 it cannot.
        total = tl.dot(b.to(OPERAND), c.to(OPERAND), total, input_precision=PRECISION)
    total *= tl.load(beta_ptr)
    where = row[:, None] * n + column[None, :]
    tl.store(
        w_ptr + where,
        total.to(w_ptr.dtype.element_ty),
        mask=(row < m)[:, None] & (column < n)[None, :],
    )


def weight_grad(compressed: Compressed, g: Tensor) -> Tensor:
    """(beta C.T @ B~).T of shape (m, n), for fp32, bf16 and fp16."""
    c, f, alpha, beta = compressed
    (tokens, m), (k, n) = g.shape, c.shape
    if tokens == 0:
        return g.new_zeros(m, n)
    if k > SORTED_ABOVE:
        return sorted_sum.weight_grad(compressed, g)
    sizes = tile("segment_sum", k, g.dtype, g.device)
    parts, tokens_each = splits(tokens, m, k, sizes, g.device)
    partial = torch.empty(parts, k, m, dtype=torch.float32, device=g.device)
    grid = (ceil_div(m, sizes["BLOCK_M"]), parts, ceil_div(k, sizes["BLOCK_K"]))
    _segment_sum_kernel[grid](
        f, alpha, g, partial, tokens, m, k, g.stride(0), g.stride(1), tokens_each,
        PRECISION=precision(g.dtype), OPERAND=operand(g.dtype), **sizes,
    )  # fmt: skip
    w = torch.empty(m, n, dtype=g.dtype, device=g.device)
    sizes = tile("expand", k, g.dtype, g.device)
    _expand_kernel[(ceil_div(m, sizes["BLOCK_M"]), ceil_div(n, sizes["BLOCK_N"]))](
        partial, c, beta, w, m, n, k, parts,
        PRECISION="tf32" if g.dtype == torch.float16 else precision(g.dtype),
        OPERAND=tl.float32 if g.dtype == torch.float16 else operand(g.dtype), **sizes,
    )  # fmt: skip
    return w
