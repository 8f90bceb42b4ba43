"""Segment sum for many generators: tokens in the order of their generator.

The product with a one-hot matrix (``segment_sum``) costs b k m multiplications, most of them with
zero; from a few hundred generators on they take longer than reading G. Once tokens are sorted by
f(i), a chunk of them meets few generators: it is multiplied with a window of the one-hot matrix
that is only 16 generators wide.

Chunk c writes its sum for generator j to slot c + j. Both only grow along the sorted tokens, so no
two sums share a slot, and generator j finds its own at c + j for the chunks c that hold it. The
second launch adds them in that order while it computes dW = beta B~.T @ C. No atomics.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.kernels.tiles import (
    ceil_div,
    chunk_size,
    operand,
    power_of_2,
    precision,
    tile,
)
from pamm.types import Compressed


@triton.jit(do_not_specialize=["tokens"])
def _sorted_sum_kernel(
    order_ptr, f_ptr, alpha_ptr, g_ptr, partial_ptr,
    tokens, m, stride_row, stride_col,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """partial[chunk + j] = sum of alpha_i G_i over the chunk's tokens i with f(i) = j."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    chunk = tl.program_id(1).to(tl.int64)
    inside = column < m
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, tokens)
    last = tl.load(f_ptr + end - 1).to(tl.int32)
    for low in range(tl.load(f_ptr + begin).to(tl.int32), last + 1, WINDOW):
        j = low + tl.arange(0, WINDOW)
        total = tl.zeros((WINDOW, BLOCK_M), tl.float32)
        for start in range(begin, end, BLOCK_T):
            place = start + tl.arange(0, BLOCK_T)
            present = place < end
            f = tl.load(f_ptr + place, mask=present, other=0).to(tl.int32)
            token = tl.load(order_ptr + place, mask=present, other=0)
            alpha = tl.load(alpha_ptr + token, mask=present, other=0.0)
            g = tl.load(
                g_ptr + token[:, None] * stride_row + column[None, :] * stride_col,
                mask=present[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            p = tl.where(j[:, None] == f[None, :], alpha[None, :], 0.0)
            total = tl.dot(p.to(OPERAND), g.to(OPERAND), total, input_precision=PRECISION)
        where = (chunk + j[:, None]) * m + column[None, :]
        tl.store(partial_ptr + where, total, mask=(j <= last)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tokens", "k", "chunks"])
def _sorted_expand_kernel(
    partial_ptr, f_ptr, c_ptr, beta_ptr, w_ptr,
    tokens, m, n, k, chunks,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dW = beta * (sums of the chunks).T @ C, for one tile of (m, n)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < chunks
    begin = chunk.to(tl.int64) * CHUNK
    first_j = tl.load(f_ptr + begin, mask=exists, other=0).to(tl.int32)
    last_j = tl.load(f_ptr + tl.minimum(begin + CHUNK, tokens) - 1, mask=exists, other=0)
    last_j = last_j.to(tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, k, BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        # Chunks before ``low`` end below generator j, chunks from ``high`` on begin above it.
        low = tl.sum(((last_j[None, :] < j[:, None]) & exists[None, :]).to(tl.int32), 1)
        high = tl.sum(((first_j[None, :] <= j[:, None]) & exists[None, :]).to(tl.int32), 1)
        high = tl.where(j < k, high, low)
        b = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for ahead in range(0, tl.max(high - low, 0)):
            slot = (low + ahead + j).to(tl.int64)
            mask = (row < m)[:, None] & (low + ahead < high)[None, :]
            b += tl.load(partial_ptr + slot[None, :] * m + row[:, None], mask=mask, other=0.0)
        c = tl.load(
            c_ptr + j[:, None].to(tl.int64) * n + column[None, :],
            mask=(j < k)[:, None] & (column < n)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(b.to(OPERAND), c.to(OPERAND), total, input_precision=PRECISION)
    total *= tl.load(beta_ptr)
    tl.store(
        w_ptr + row[:, None] * n + column[None, :],
        total.to(w_ptr.dtype.element_ty),
        mask=(row < m)[:, None] & (column < n)[None, :],
    )


def weight_grad(compressed: Compressed, g: Tensor) -> Tensor:
    """(beta C.T @ B~).T of shape (m, n), for fp32, bf16 and fp16 and at least one token."""
    c, f, alpha, beta = compressed
    (tokens, m), (k, n) = g.shape, c.shape
    f_sorted, order = torch.sort(f, stable=True)
    chunk = chunk_size(tokens)
    chunks = ceil_div(tokens, chunk)
    sizes = tile("sorted_sum", k, g.dtype, g.device)
    partial = torch.empty(chunks + k, m, dtype=torch.float32, device=g.device)
    _sorted_sum_kernel[(ceil_div(m, sizes["BLOCK_M"]), chunks)](
        order, f_sorted, alpha, g, partial, tokens, m, g.stride(0), g.stride(1),
        PRECISION=precision(g.dtype), OPERAND=operand(g.dtype), CHUNK=chunk, **sizes,
    )  # fmt: skip
    w = torch.empty(m, n, dtype=g.dtype, device=g.device)
    sizes = tile("sorted_expand", k, g.dtype, g.device)
    # In fp16 a sum over many tokens can overflow, in tf32 it cannot.
    narrow = g.dtype == torch.float16
    _sorted_expand_kernel[(ceil_div(m, sizes["BLOCK_M"]), ceil_div(n, sizes["BLOCK_N"]))](
        partial, f_sorted, c, beta, w, tokens, m, n, k, chunks,
        PRECISION="tf32" if narrow else precision(g.dtype),
        OPERAND=tl.float32 if narrow else operand(g.dtype),
        CHUNK=chunk, CHUNKS=power_of_2(chunks), **sizes,
    )  # fmt: skip
    return w
