"""Tokens drawn in backward by the size of their gradients; X is made again there."""

import torch
from jaxtyping import Float
from torch import Tensor

from pamm import ops
from pamm.compressors.protocol import Memoryless, State
from pamm.config import PammConfig
from pamm.stream import Draw


class Sampled(Memoryless):
    """dW ~ sum over c drawn tokens of (1 / q_s) g_s x_s.T: ``pamm.sampling`` behind the protocol.

    The state is one number, where the draw begins; X follows it (``needs_x``).
    """

    needs_x = True

    def __init__(self, config: PammConfig) -> None:
        self.config = config

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """A number in [0, 1), in steps of 1 / tokens."""
        return (draw(len(x), min(1, len(x)), x.device).double() / max(len(x), 1),)

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        """From as many tokens as ``config`` says."""
        offset, x = state
        c = self.config.generators(len(grad))
        with ops.no_autocast(grad):
            if c >= len(grad):
                return grad.T @ x.to(grad.dtype)
            x_rows, g_rows = ops.sample(x, grad, c, offset, self.config.backend)
            return g_rows.T @ x_rows

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """The one number: X itself is made again in backward."""
        return torch.float64.itemsize * min(1, tokens)
