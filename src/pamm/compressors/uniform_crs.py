"""Uniform column-row sampling: PAMM when every row but the generators is dropped."""

import torch
from jaxtyping import Float
from torch import Tensor

from pamm import ops
from pamm.compressors.protocol import Memoryless, State
from pamm.config import PammConfig
from pamm.stream import Draw
from pamm.types import accumulation_dtype


class UniformCRS(Memoryless):
    """X.T @ G is estimated as b/k times its sum over k rows: unbiased, and noisy.

    Equal to PAMM with tolerance 0 on the same draw, without the assignment and the coefficients.
    """

    def __init__(self, config: PammConfig) -> None:
        self.config = config

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """The sampled rows of X and their row numbers."""
        index = draw(len(x), self.config.generators(len(x)), x.device)
        return x[index], index

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        """(b/k) sum_i over sampled rows of G_i X_i.T, with the sum in fp32 (fp64 for fp64)."""
        rows, index = state
        wide = accumulation_dtype(grad.dtype)
        with ops.no_autocast(grad):
            scale = len(grad) / max(len(index), 1)
            return (scale * (grad[index].to(wide).T @ rows.to(wide))).to(grad.dtype)

    def dropped(self, state: State, tokens: int) -> Tensor | float:
        """All but the sampled ones."""
        _, index = state
        return float(tokens - len(index))

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """k rows and k row numbers."""
        k = self.config.generators(tokens)
        return k * in_features * dtype.itemsize + k * torch.int64.itemsize
