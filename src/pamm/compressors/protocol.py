"""What every compressor offers."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pamm.stream import Draw

State = tuple[Tensor, ...]
"""What is saved for backward in place of X: tensors only, so that offloading hooks see them all."""


@runtime_checkable
class Compressor(Protocol):
    """Keeps a state instead of X, and gives an approximate weight gradient from it."""

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """The state to save for backward. Does not change X and does not alias it, unless exact."""
        ...

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        """An approximation of (X.T @ G).T, in the layout of ``nn.Linear.weight`` and G's dtype."""
        ...

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """Bytes of the state, exactly as ``compress`` will return it."""
        ...
