"""Directions in which most of X's energy lies, carried from step to step."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pamm import ops


class Carrying(ABC):
    """The part of the protocol that methods share which carry directions, (n, k) in fp32."""

    axes: Tensor
    """Orthonormal columns: at first unit vectors, which the first passes turn."""
    passes: Tensor
    """How many forward passes have learned; on the CPU, where the next one is decided on."""

    @abstractmethod
    def width(self, in_features: int) -> int:
        """How many directions."""

    def prepare(self, in_features: int, device: torch.device) -> None:
        """The first unit vectors."""
        device = torch.device("cpu") if device.type == "meta" else device
        shape = in_features, self.width(in_features)
        self.axes = torch.eye(*shape, device=device, dtype=torch.float32)
        self.passes = torch.zeros(1, dtype=torch.int64, device="cpu")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy learns by itself, also one that another process got in shared memory."""
        vars(self).update(state)
        if "axes" in state:  # it is prepared
            self.axes, self.passes = self.axes.clone(), self.passes.clone()

    def move(self, device: torch.device) -> None:
        """The directions go along with the layers."""
        if self.axes.device != device and device.type != "meta":
            self.axes = self.axes.to(device)

    def carried(self) -> dict[str, Tensor]:
        """The directions, and how many forward passes have learned, if there are any."""
        return {"axes": self.axes, "passes": self.passes} if self.axes.numel() else {}

    def advance(self, x: Float[Tensor, "tokens n"]) -> None:
        """Bring the directions up to date with X, now and then."""
        if self.axes.numel():
            self.move(x.device)
            ops.refresh(self.axes, self.passes, x)

    def dropped(self, state: tuple[Tensor, ...], tokens: int) -> Tensor | float:
        """No token."""
        return 0.0
