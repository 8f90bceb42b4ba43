"""The control: X itself is kept, and the weight gradient is exact."""

import torch
from jaxtyping import Float
from torch import Tensor

from pamm.compressors.protocol import State
from pamm.config import PammConfig
from pamm.stream import Draw


class Exact:
    """Keeps X. Takes the same path through autograd as the others, to compare like with like."""

    def __init__(self, config: PammConfig) -> None:
        del config

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """X as it is."""
        return (x,)

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        """(X.T @ G).T, exactly as ``nn.Linear`` computes it."""
        (x,) = state
        return grad.T @ x.to(grad.dtype)

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """All of X."""
        return tokens * in_features * dtype.itemsize
