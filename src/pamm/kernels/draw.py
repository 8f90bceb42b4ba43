"""Triton twin of ``pamm.permutation.permutation_prefix``: the same integers, in one launch."""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Triton types what a kernel sees, not what its launcher takes.)
import torch
import triton
import triton.language as tl
from torch import Tensor

from pamm.permutation import GOLDEN, ROUNDS, domain

_BLOCK = 1024


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


@triton.jit
def _scramble(x):
    x = x * 0x735A2D97
    x = (x ^ (x >> 29)) * 0x21F0AAAD9E3779B1
    return (x >> 33) & 0x7FFFFFFF


@triton.jit
def _remainder(x, y):
    """Of a word below 2^32: in 32 bits, where a division takes a fraction of the time."""
    return (x.to(tl.uint32) % y.to(tl.uint32)).to(tl.int64)


@triton.jit(do_not_specialize=["rank", "tokens", "k", "p", "q", "values"])
def _draw_kernel(
    state_ptr, index_ptr, rank, tokens, k, p, q, values,
    ADVANCE: tl.constexpr, ROUNDS: tl.constexpr, GOLDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program walks over the values and keeps, in order, those below ``tokens``."""
    position = tl.load(state_ptr)
    if ADVANCE:
        position += 1
    low = tl.load(state_ptr + 1)
    high = tl.load(state_ptr + 2) ^ (rank.to(tl.int64) * GOLDEN & 0xFFFFFFFF)
    key = _mix((position & 0xFFFFFFFF) ^ _mix(low))
    key = _mix(key ^ ((position >> 32) & 0xFFFFFFFF) ^ _mix(high))
    found = tokens * 0
    for start in range(0, values, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        left = (offset // q).to(tl.int64)
        right = (offset % q).to(tl.int64)
        for number in tl.static_range(0, ROUNDS, 2):
            even = _mix((key + (number + 1) * GOLDEN) & 0xFFFFFFFF)
            odd = _mix((key + (number + 2) * GOLDEN) & 0xFFFFFFFF)
            left = _remainder(left + _scramble(right ^ even), p)
            right = _remainder(right + _scramble(left ^ odd), q)
        value = left * q + right
        valid = (value < tokens) & (offset < values)
        slot = found + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(index_ptr + slot, value, mask=valid & (slot < k))
        found += tl.sum(valid.to(tl.int32), 0)
    if ADVANCE:
        tl.debug_barrier()  # every thread has read the position
        tl.store(state_ptr, position)


def draw(state: Tensor, rank: int, tokens: int, k: int, advance: bool) -> Tensor:
    """The first k values of the permutation that ``state`` names, or, to advance, of the next."""
    p, q = domain(tokens)
    index = torch.empty(k, dtype=torch.int64, device=state.device)
    _draw_kernel[(1,)](
        state, index, rank, tokens, k, p, q, k + p * q - tokens,
        ADVANCE=advance, ROUNDS=ROUNDS, GOLDEN=GOLDEN, BLOCK=_BLOCK,
    )  # fmt: skip
    return index
