"""The two operations of PAMM, on whichever backend serves the device.

Both are deterministic functions of their arguments: drawing the generators is done before, by
``pamm.stream``. Both run outside autocast, which would round their fp32 sums.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from pamm.kernels import plain
from pamm.types import Compressed


def compress(
    x: Float[Tensor, "tokens n"], index: Integer[Tensor, " k"], tolerance: float | None = None
) -> Compressed:
    """Keep the rows ``index`` of X, an assignment and a coefficient: ``reference.compress``."""
    with no_autocast(x):
        return plain.compress(x, index, tolerance)


def contract(compressed: Compressed, b: Float[Tensor, "tokens m"]) -> Float[Tensor, "k m"]:
    """beta B~, with B~_j the alpha-weighted sum of the rows of B assigned to generator j.

    Stays in fp32 (fp64 for fp64 inputs): in fp16 a sum over many tokens would overflow.
    """
    c, f, alpha, beta = compressed
    with no_autocast(b):
        return plain.segment_sum(f, alpha, b, len(c)).mul_(beta)


def expand(
    compressed: Compressed, contracted: Float[Tensor, "k m"], dtype: torch.dtype
) -> Float[Tensor, "m n"]:
    """(C.T @ B~).T, the approximate product in the layout of ``nn.Linear.weight``."""
    with no_autocast(contracted):
        return (contracted.T @ compressed.generators.to(contracted.dtype)).to(dtype)


def no_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Sums in fp32 stay in fp32 inside this context."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
