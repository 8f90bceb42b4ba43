"""The private random stream: which rows become generators.

Generators are drawn from a keyed permutation of [0, tokens), a Feistel network over Z_p x Z_q
with p q just above the number of tokens. It is a pure function of (seed, name, rank, position):
torch's global random state is neither read nor changed, so dropout masks stay those of exact
training; nothing is sorted; and the same integers come out on every device.
"""

import math
import zlib

import torch
from jaxtyping import Int64
from torch import Tensor

_WORD = (1 << 32) - 1
_GOLDEN = 0x9E3779B9
_ROUNDS = 8  # 6 are not enough for 4 or 5 tokens: their pairs came out visibly uneven


class Stream:
    """Draws of one group: ``draw`` gives the next k of ``tokens`` rows.

    The position is an integer on the device, so that drawing never waits for the host and works in
    a captured graph. Ranks of ``torch.distributed`` draw different rows.

    Args:
        seed: the same seed gives the same draws.
        name: separates the streams of a model's groups.

    Example:
        >>> Stream(seed=1).draw(tokens=8, k=3, device=torch.device("cpu")).shape
        torch.Size([3])
    """

    def __init__(self, seed: int = 0, name: str = "") -> None:
        self._key = (_mix_int(seed & _WORD) ^ _mix_int(seed >> 32), zlib.crc32(name.encode()))
        self._position = torch.zeros((), dtype=torch.int64)

    def draw(self, tokens: int, k: int, device: torch.device) -> Int64[Tensor, " k"]:
        """The next k row numbers, uniform without replacement."""
        if self._position.device != device:
            self._position = self._position.to(device)
        low, high = self._key
        index = permutation_prefix(
            tokens, k, low, high ^ (_rank() * _GOLDEN & _WORD), self._position
        )
        self._position += 1
        return index

    def seek(self, step: int) -> None:
        """Go to the first draw of training step ``step``; each step has room for 2^32 draws."""
        self._position.fill_(step << 32)


def permutation_prefix(
    tokens: int, k: int, key_low: int, key_high: int, position: Int64[Tensor, ""]
) -> Int64[Tensor, " k"]:
    """The first k values of the keyed permutation of [0, tokens) number ``position``.

    The network permutes [0, p q) with p q - tokens < sqrt(tokens) + 1. Values past the end are
    skipped, so the first k + p q - tokens of them always hold k that are valid.
    """
    p = math.isqrt(max(tokens - 1, 0)) + 1
    q = -(-tokens // p)
    device = position.device
    key = _mix((position & _WORD) ^ _mix_int(key_low))
    key = _mix(key ^ ((position >> 32) & _WORD) ^ _mix_int(key_high))
    rounds = _mix((key + torch.arange(1, _ROUNDS + 1, device=device) * _GOLDEN) & _WORD).unbind()

    value = torch.arange(k + p * q - tokens, device=device)
    left, right = value // max(q, 1), value % max(q, 1)
    for number in range(0, _ROUNDS, 2):
        left = (left + _scramble(right ^ rounds[number])) % p
        right = (right + _scramble(left ^ rounds[number + 1])) % max(q, 1)
    value = left * q + right

    valid = value < tokens
    slot = torch.where(valid, valid.cumsum(0) - 1, k).clamp(max=k)  # the surplus goes to slot k
    return value.new_empty(k + 1).scatter_(0, slot, value)[:k].clone()


def _mix(x: Tensor) -> Tensor:
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


def _mix_int(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & _WORD
    x ^= x >> 15
    x = (x * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0
