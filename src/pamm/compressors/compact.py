"""CompAct: features of X projected on a few random directions, the same for every row."""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from pamm import ops
from pamm.compressors.protocol import Memoryless, State
from pamm.config import PammConfig
from pamm.permutation import GOLDEN, mix
from pamm.stream import Draw
from pamm.types import accumulation_dtype

_SEEDS = 1 << 30
_WORD = (1 << 32) - 1


class CompAct(Memoryless):
    """X.T @ G is estimated as S ((X S).T @ G), S a Gaussian (n, k') with E[S S.T] = I: unbiased.

    CompAct (Shamshoum et al., 2024), as the PAMM paper compares with it. Kept are X S and a seed;
    S is made anew in backward. ``ratio`` is the share of *features* kept, k' = ceil(ratio n), so
    that at any ratio about that share of X's bytes is held, as by the methods that keep rows.
    """

    def __init__(self, config: PammConfig) -> None:
        self.config = config

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """X S, and the seed of S, a number that the stream draws."""
        seeds = draw(_SEEDS, 1, x.device).expand(x.shape[1])  # n of them in the bytes of one
        directions = _gaussian(seeds, self.config.generators(x.shape[1]))
        return x @ directions.to(x.dtype), seeds

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        """(S ((X S).T @ G)).T; the second product in fp32 (fp64 for fp64)."""
        projected, seeds = state
        wide = accumulation_dtype(grad.dtype)
        with ops.no_autocast(grad):
            directions = _gaussian(seeds, projected.shape[1])
            inner = (grad.T @ projected.to(grad.dtype)).to(wide)
            return (inner @ directions.to(wide).T).to(grad.dtype)

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """k' numbers for each token, and the seed."""
        k = self.config.generators(in_features)
        return tokens * k * dtype.itemsize + torch.int64.itemsize


def _gaussian(seeds: Int64[Tensor, " n"], k: int) -> Float[Tensor, "n k"]:
    """An fp32 matrix with independent entries from N(0, 1/k), a function of the seed alone.

    A counter, hashed to two uniform numbers, and Box and Muller's transform: torch's generators
    would need the seed on the host, which would wait for the device for it.
    """
    counter = torch.arange(len(seeds) * k, device=seeds.device).view(-1, k)
    first = mix(mix((seeds[:, None] * GOLDEN) & _WORD) ^ counter)
    second = mix((first + GOLDEN) & _WORD)
    # 24 bits each, as many as fp32 has; the first is never 0, for its logarithm is taken.
    radius = (((first >> 8) + 1).float() / (1 << 24)).log().mul(-2 / k).sqrt()
    return radius * ((second >> 8).float() * (2 * math.pi / (1 << 24))).cos()
