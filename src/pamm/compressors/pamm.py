"""The paper's method: generators, an assignment and a coefficient for every token."""

import torch
from jaxtyping import Float
from torch import Tensor

from pamm import ops
from pamm.compressors.protocol import Memoryless, State
from pamm.config import PammConfig
from pamm.stream import Draw
from pamm.types import Compressed, assignment_dtype


class Pamm(Memoryless):
    """Point-approximate matrix multiplication: ``pamm.reference`` behind the protocol."""

    def __init__(self, config: PammConfig) -> None:
        self.config = config

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """C, f, alpha and beta (``pamm.types.Compressed``)."""
        index = draw(len(x), self.config.generators(len(x)), x.device)
        return ops.compress(x, index, self.config.tolerance, self.config.backend)

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        """(beta C.T @ B~).T, where B~_j is the alpha-weighted sum of the gradients of group j."""
        return ops.weight_grad(Compressed(*state), grad, self.config.backend)

    def dropped(self, state: State, tokens: int) -> Tensor | float:
        """Those that the tolerance dropped: beta = b / (b - dropped)."""
        return tokens * (1 - 1 / Compressed(*state).normalization)

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """k n numbers, and for each token a number and a small integer; beta is 4 bytes."""
        k = self.config.generators(tokens)
        a_token = dtype.itemsize + assignment_dtype(k).itemsize
        return k * in_features * dtype.itemsize + tokens * a_token + torch.float32.itemsize
