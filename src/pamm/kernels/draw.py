"""Triton twin of ``pamm.permutation.permutation_prefix``: the same integers, in one launch."""

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


@triton.jit(do_not_specialize=["key_low", "key_high", "tokens", "k", "p", "q"])
def _draw_kernel(
    position_ptr, index_ptr, key_low, key_high, tokens, k, p, q,
    ADVANCE: tl.constexpr, ROUNDS: tl.constexpr, GOLDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program walks over the values and keeps, in order, those below ``tokens``."""
    position = tl.load(position_ptr)
    if ADVANCE:
        position += 1
    key = _mix((position & 0xFFFFFFFF) ^ _mix(key_low.to(tl.int64) & 0xFFFFFFFF))
    key = _mix(key ^ ((position >> 32) & 0xFFFFFFFF) ^ _mix(key_high.to(tl.int64) & 0xFFFFFFFF))
    wide_q = q.to(tl.int64)
    wide_p = p.to(tl.int64)
    found = tokens * 0
    values = k + p * q - tokens
    for start in range(0, values, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        value = offset.to(tl.int64)
        left = value // wide_q
        right = value % wide_q
        for number in tl.static_range(0, ROUNDS, 2):
            even = _mix((key + (number + 1) * GOLDEN) & 0xFFFFFFFF)
            odd = _mix((key + (number + 2) * GOLDEN) & 0xFFFFFFFF)
            left = (left + _scramble(right ^ even)) % wide_p
            right = (right + _scramble(left ^ odd)) % wide_q
        value = left * wide_q + right
        valid = (value < tokens) & (offset < values)
        slot = found + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(index_ptr + slot, value, mask=valid & (slot < k))
        found += tl.sum(valid.to(tl.int32), 0)
    if ADVANCE:
        tl.debug_barrier()  # every thread has read the position
        tl.store(position_ptr, position)


def draw(
    position: Tensor, key_low: int, key_high: int, tokens: int, k: int, advance: bool
) -> Tensor:
    """The first k values of permutation number ``position``, or, to advance, of the next one."""
    p, q = domain(tokens)
    # As signed words, or the type of the argument would change with the key.
    key_low, key_high = (key - ((key >> 31) << 32) for key in (key_low, key_high))
    index = torch.empty(k, dtype=torch.int64, device=position.device)
    _draw_kernel[(1,)](
        position, index, key_low, key_high, tokens, k, p, q,
        ADVANCE=advance, ROUNDS=ROUNDS, GOLDEN=GOLDEN, BLOCK=_BLOCK,
    )  # fmt: skip
    return index
