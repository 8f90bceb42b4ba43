"""Triton twin of ``reference.compress``: two launches, X read once.

The first gathers the generators and takes their norms, one program a generator. The second walks
over tiles of the other tokens: similarities with all generators, argmax, coefficient and the test
of eq. 3 in registers; no (tokens, k) matrix is ever in memory. Above ``BLOCK_K`` generators the
tile of X is read again for each tile of generators, from the cache.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.kernels.tiles import ceil_div, operand, power_of_2, precision, tile
from pamm.types import Compressed, assignment_dtype


@triton.jit
def _gather_kernel(
    x_ptr, index_ptr, c_ptr, inverse_ptr, f_ptr, alpha_ptr, beta_ptr, counter_ptr,
    n, stride_row, stride_col,
    TESTED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """C_j = X[index_j]; 1 / ||C_j||, 0 for a zero row; f and alpha of the generator itself."""
    j = tl.program_id(0).to(tl.int64)
    row = tl.load(index_ptr + j).to(tl.int64)
    square = 0.0
    size = 0.0
    for start in range(0, n, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = column < n
        value = tl.load(x_ptr + row * stride_row + column * stride_col, mask=inside, other=0.0)
        tl.store(c_ptr + j * n + column, value, mask=inside)
        wide = value.to(tl.float32)
        square += tl.sum(wide * wide, 0)
        # A sum, not a maximum: NaN must come out as "not zero".
        size += tl.sum(tl.abs(wide), 0)
    zero = square == 0  # written so that NaN is not zero
    tl.store(inverse_ptr + j, tl.where(zero, 0.0, 1.0 / tl.sqrt(tl.where(zero, 1.0, square))))
    tl.store(f_ptr + row, j.to(f_ptr.dtype.element_ty))
    tl.store(alpha_ptr + row, tl.where(size == 0, 0.0, 1.0).to(alpha_ptr.dtype.element_ty))
    if j == 0:
        tl.store(beta_ptr, 1.0)
        if TESTED:
            tl.store(counter_ptr, 0)
            tl.store(counter_ptr + 1, 0)


@triton.jit(do_not_specialize=["tokens", "k", "least_cosine_squared"])
def _assign_kernel(
    x_ptr, c_ptr, index_ptr, inverse_ptr, f_ptr, alpha_ptr, beta_ptr, counter_ptr,
    tokens, n, k, stride_row, stride_col, least_cosine_squared,
    TESTED: tl.constexpr, DROP_ALL: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """f, alpha and (if tested) beta for those of BLOCK_T tokens that are no generators."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK_T
    token = begin + tl.arange(0, BLOCK_T)
    present = token < tokens
    row = x_ptr + token[:, None] * stride_row
    best = tl.zeros((BLOCK_T,), tl.float32)  # the csim * ||X_i|| of largest size so far
    f = tl.zeros((BLOCK_T,), tl.int32)
    square = tl.zeros((BLOCK_T,), tl.float32)
    generator = tl.zeros((BLOCK_T,), tl.int32)

    for first in range(0, k, BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        exists = j < k
        similarity = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
        for start in range(0, n, BLOCK_N):
            column = start + tl.arange(0, BLOCK_N)
            inside = column < n
            x = tl.load(
                row + column[None, :].to(tl.int64) * stride_col,
                mask=present[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            c = tl.load(
                c_ptr + j[None, :].to(tl.int64) * n + column[:, None],
                mask=exists[None, :] & inside[:, None], other=0.0,
            )  # fmt: skip
            similarity = tl.dot(x.to(OPERAND), c.to(OPERAND), similarity, input_precision=PRECISION)
            if TESTED and first == 0:
                wide = x.to(tl.float32)
                square += tl.sum(wide * wide, 1)
        similarity *= tl.load(inverse_ptr + j, mask=exists, other=0.0)[None, :]
        if x_ptr.dtype.element_ty == tl.float32:
            # NaN is larger than anything: it must not get lost.
            similarity = tl.where(similarity != similarity, float("inf"), similarity)
            size, tile_j = tl.max(tl.abs(similarity), 1, return_indices=True)
            chosen = tl.arange(0, BLOCK_K)[None, :] == tile_j[:, None]
            of_tile = tl.sum(tl.where(chosen, similarity, 0.0), 1)
        else:
            # Size, sign and place in one word, of which an integer maximum finds all three: a
            # third of the work. 14 bits of the size are left, more than the result will have;
            # NaN is the largest of all.
            bits = similarity.to(tl.int32, bitcast=True)
            place = BLOCK_K - 1 - tl.arange(0, BLOCK_K)[None, :]
            word = tl.max((bits & 0x7FFFFE00) | ((bits >> 23) & 0x100) | place, 1)
            tile_j = BLOCK_K - 1 - (word & 0xFF)
            half = (word & 0x7FFFFE00) | tl.where(word < 0x200, 0, 0x100)  # of what was cut off
            size = half.to(tl.float32, bitcast=True)
            of_tile = tl.where((word & 0x100) != 0, -size, size)
        better = (size > tl.abs(best)) | (size != size) | (first == 0)
        best = tl.where(better, of_tile, best)
        f = tl.where(better, tl.minimum(first + tile_j, k - 1), f)  # NaN is also beyond the last
        drawn = tl.load(index_ptr + j, mask=exists, other=-1) - begin
        if tl.sum(((drawn >= 0) & (drawn < BLOCK_T)).to(tl.int32), 0) > 0:
            itself = tl.arange(0, BLOCK_T)[:, None] == drawn.to(tl.int32)[None, :]
            generator += tl.sum(itself.to(tl.int32), 1)

    alpha = best * tl.load(inverse_ptr + f)
    mine = present & (generator == 0)
    if TESTED:
        # Compares false for NaN and for zero rows, which are kept.
        too_far = best * best < least_cosine_squared * square
        if DROP_ALL:
            too_far = token >= 0
        dropped = too_far & mine
        alpha = tl.where(dropped, 0.0, alpha)
        tl.atomic_add(counter_ptr, tl.sum(dropped.to(tl.int32), 0))
        done = tl.atomic_add(counter_ptr + 1, 1)
        if done == tl.num_programs(0) - 1:
            kept = tokens - tl.atomic_add(counter_ptr, 0)
            # Rounded as torch rounds: a plain division is off by a unit on GPUs.
            tl.store(beta_ptr, tl.div_rn(tokens.to(tl.float32), kept.to(tl.float32)))
    tl.store(f_ptr + token, f.to(f_ptr.dtype.element_ty), mask=mine)
    tl.store(alpha_ptr + token, alpha.to(alpha_ptr.dtype.element_ty), mask=mine)


def compress(x: Tensor, index: Tensor, tolerance: float | None) -> Compressed:
    """The twin of ``reference.compress``, for fp32, bf16 and fp16."""
    (tokens, n), k = x.shape, len(index)
    device = x.device
    tested = tolerance is not None and tolerance < 1
    c = torch.empty(k, n, dtype=x.dtype, device=device)
    f = torch.empty(tokens, dtype=assignment_dtype(k), device=device)
    alpha = torch.empty(tokens, dtype=x.dtype, device=device)
    beta = torch.empty((), dtype=torch.float32, device=device)
    inverse = torch.empty(k, dtype=torch.float32, device=device)
    counter = torch.empty(2, dtype=torch.int32, device=device) if tested else f
    if tokens == 0:
        return Compressed(c, f, alpha, beta.fill_(1))

    sizes = tile("assign", k, x.dtype, device)
    _gather_kernel[(k,)](
        x, index, c, inverse, f, alpha, beta, counter, n, x.stride(0), x.stride(1),
        TESTED=tested, BLOCK_N=min(1024, power_of_2(n)), num_warps=4,
    )  # fmt: skip
    _assign_kernel[(ceil_div(tokens, sizes["BLOCK_T"]),)](
        x, c, index, inverse, f, alpha, beta, counter,
        tokens, n, k, x.stride(0), x.stride(1),
        1 - tolerance**2 if tolerance is not None else 0.0,
        TESTED=tested, DROP_ALL=tolerance == 0, PRECISION=precision(x.dtype),
        OPERAND=operand(x.dtype), **sizes,
    )  # fmt: skip
    return Compressed(c, f, alpha, beta)
