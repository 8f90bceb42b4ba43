"""A keyed permutation of [0, tokens): how rows are drawn without a sort and without global state.

A Feistel network over Z_p x Z_q, with p q just above the number of tokens. It is a pure function of
(key, position), in integers only, so every device gives the same draw.
"""

import math

import torch
from jaxtyping import Int64
from torch import Tensor

ROUNDS = 8  # 6 are not enough for 4 or 5 tokens: their pairs came out visibly uneven
GOLDEN = 0x9E3779B9
_WORD = (1 << 32) - 1


def permutation_prefix(
    state: Int64[Tensor, " 3"], rank: int, tokens: int, k: int
) -> Int64[Tensor, " k"]:
    """The first k values of one permutation of [0, tokens).

    Which one, says ``state``, a position and two words of a key, and the rank. The network permutes
    [0, p q). Values past the end are skipped, so the first k + p q - tokens
    of them always hold k that are valid.
    """
    p, q = domain(tokens)
    device = state.device
    position, low, high = state.unbind()
    key = mix((position & _WORD) ^ mix(low))
    key = mix(key ^ ((position >> 32) & _WORD) ^ mix(high ^ (rank * GOLDEN & _WORD)))
    rounds = mix((key + torch.arange(1, ROUNDS + 1, device=device) * GOLDEN) & _WORD).unbind()

    value = torch.arange(k + p * q - tokens, device=device)
    left, right = value // q, value % q
    for number in range(0, ROUNDS, 2):
        left = (left + _scramble(right ^ rounds[number])) % p
        right = (right + _scramble(left ^ rounds[number + 1])) % q
    value = left * q + right

    valid = value < tokens
    slot = torch.where(valid, valid.cumsum(0) - 1, k).clamp(max=k)  # the surplus goes to slot k
    return value.new_empty(k + 1).scatter_(0, slot, value)[:k].clone()


def domain(tokens: int) -> tuple[int, int]:
    """p and q with p q >= tokens and p q - tokens < sqrt(tokens) + 1."""
    p = math.isqrt(max(tokens - 1, 0)) + 1
    return p, max(1, -(-tokens // p))


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words with good avalanche, held in int64 (multiply-xorshift)."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def _scramble(x: Tensor) -> Tensor:
    """A 31-bit hash of a 32-bit word, from the high bits of two products modulo 2^64."""
    x = x * 0x735A2D97
    x = (x ^ (x >> 29)) * 0x21F0AAAD9E3779B1
    return (x >> 33) & (_WORD >> 1)
