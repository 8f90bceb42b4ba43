"""X on some directions, most of them carried from step to step, in 4 and 2 bits a number."""

import torch
from jaxtyping import Float
from torch import Tensor

from pamm import ops, subspace
from pamm.compressors.carrying import Carrying
from pamm.compressors.protocol import State
from pamm.config import PammConfig
from pamm.stream import Draw
from pamm.types import accumulation_dtype


class Subspace(Carrying):
    """dW.T ~= Q diag(w) ((X Q).T @ G): ``pamm.subspace`` behind the protocol.

    The state is X Q in 4 and 2 bits, two sizes for each token, a scale for each direction, and Q.
    Between steps the group carries Q1 (n, k1).
    """

    needs_x = False

    def __init__(self, config: PammConfig) -> None:
        self.config = config

    def width(self, in_features: int) -> int:
        """Those carried with four bits and with two."""
        fine, coarse, _ = subspace.directions(self.config.ratio, in_features)
        return fine + coarse

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """Codes, sizes, scales (times w) and Q."""
        self.move(x.device)
        n, carried = self.axes.shape
        # From shapes, not from the ratio: torch.compile may make a symbol of a float that changed.
        fine = carried // 2
        fresh = max(1, fine)
        drawn = draw(n, fresh, x.device)
        z, basis = ops.project(x, self.axes, drawn)
        codes, size, scale = ops.encode(z, fine, self.config.backend)
        scale[carried:] *= n / fresh
        return codes, size, scale, basis

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        """(Q diag(w) ((X Q).T @ G)).T."""
        codes, size, scale, basis = state
        k = len(scale)
        with ops.no_autocast(grad):
            z = ops.decode(codes, size, k // 3, k, self.config.backend)
            inner = (grad.T @ z.to(grad.dtype)).to(scale.dtype) * scale
            return inner.to(grad.dtype) @ basis.T.to(grad.dtype)

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """k / 3 bytes and two numbers a token; a scale and n numbers for each direction."""
        fine, coarse, fresh = subspace.directions(self.config.ratio, in_features)
        k = fine + coarse + fresh
        a_token = subspace.code_bytes(fine, k) + 2 * dtype.itemsize
        scale = accumulation_dtype(dtype).itemsize
        return tokens * a_token + k * (scale + in_features * dtype.itemsize)
