"""Tokens drawn in backward by the size of their gradients; X is made again there."""

import torch
from jaxtyping import Float
from torch import Tensor

from pamm import fp8, ops, sampling
from pamm.compressors.carrying import Carrying
from pamm.compressors.protocol import State
from pamm.config import PammConfig
from pamm.stream import Draw

_STEPS = 1 << 30


class Sampled(Carrying):
    """dW ~ G_c.T @ X_c, of c drawn tokens and k directions: ``pamm.sampling`` behind the protocol.

    The state is one number, where the draw begins, and P (n, k); X follows it (``needs_x``).
    Between steps the group carries P.
    """

    needs_x = True

    def __init__(self, config: PammConfig) -> None:
        self.config = config

    def width(self, in_features: int) -> int:
        """As many as the configuration says, if there are features for them."""
        assert self.config.directions is not None
        return sampling.directions(self.config.directions, in_features)

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """A number in [0, 1), in steps so fine that no token is too rare for them; with directions,
        and P as it is now.
        """
        offset = draw(_STEPS, 1, x.device).double() / _STEPS
        if not self.axes.numel():
            return (offset,)
        self.move(x.device)
        return offset, (self.axes * sampling.unit(len(self.axes))).to(x.dtype)

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        """From as many tokens as ``config`` says; from all of them exact, but for 8 bits."""
        offset, *basis, x = state
        c, backend = self.config.generators(len(grad)), self.config.backend
        in_8_bits = self.config.fp8 and fp8.is_served(grad.device, grad.dtype)
        with ops.no_autocast(grad):
            if in_8_bits and 0 < c == len(grad):
                basis = []  # directions are for what is not drawn
            # So many rows stand for X: no fewer than it has would take as long, and be less exact.
            elif c + (basis[0].shape[1] if basis else 0) >= len(grad):
                return grad.T @ x.to(grad.dtype)
            # Not in the op: torch.compile has one z for q, k and v, and takes sizes as it makes G.
            whole = sampling.whole(x, basis[0], grad) if basis else None
            size = sampling.sizes(grad)
            if in_8_bits:
                return ops.sample_fp8(x, grad, size, fp8.largest(x), c, offset, whole, backend)
            x_rows, g_rows = ops.sample(x, grad, size, c, offset, whole, backend)
            return (g_rows.T @ x_rows)[: grad.shape[1], : x.shape[1]]

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """The number and P: X itself is made again in backward."""
        basis = in_features * self.width(in_features) * dtype.itemsize
        return torch.float64.itemsize + basis
