"""What every compressor offers."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pamm.stream import Draw

State = tuple[Tensor, ...]
"""What is saved for backward in place of X: tensors only, so that offloading hooks see them."""


@runtime_checkable
class Compressor(Protocol):
    """Keeps a state instead of X, and gives an approximate weight gradient from it."""

    needs_x: bool
    """Whether X itself follows the state: for methods that have it made again in backward."""

    def prepare(self, in_features: int, device: torch.device) -> None:
        """Make what is carried from step to step, for inputs of ``in_features``."""
        ...

    def move(self, device: torch.device) -> None:
        """Take what is carried to another device."""
        ...

    def carried(self) -> dict[str, Tensor]:
        """The tensors carried, by name; a resumed run gets them back."""
        ...

    def advance(self, x: Float[Tensor, "tokens n"]) -> None:
        """A new forward pass begins, with this X: what is carried may learn from it."""
        ...

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """The state to save for backward. Does not change X and does not alias it, unless exact."""
        ...

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        """An approximation of (X.T @ G).T, in the layout of ``nn.Linear.weight`` and G's dtype."""
        ...

    def dropped(self, state: State, tokens: int) -> Tensor | float:
        """How many of the tokens have no part in this state."""
        ...

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """Bytes of the state, exactly as ``compress`` will return it."""
        ...


class Memoryless:
    """The part of the protocol that methods share which carry nothing from step to step; most of
    them drop no token either.
    """

    needs_x = False

    def prepare(self, in_features: int, device: torch.device) -> None:
        """Nothing to make."""

    def move(self, device: torch.device) -> None:
        """Nothing to move."""

    def carried(self) -> dict[str, Tensor]:
        """Nothing to keep."""
        return {}

    def advance(self, x: Float[Tensor, "tokens n"]) -> None:
        """Nothing to learn."""

    def dropped(self, state: State, tokens: int) -> Tensor | float:
        """None of them."""
        return 0.0
