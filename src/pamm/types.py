"""The vocabulary: axis names used in every signature, and the compressed form of a matrix.

========  ==========================================================  =====================
axis      meaning                                                     the paper's letter
========  ==========================================================  =====================
tokens    rows of the flattened input, batch times sequence           b = BL
n         features of the input                                       n
m         features of the output                                      m
k         generators                                                  k = ceil(r b)
========  ==========================================================  =====================
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor


class Compressed(NamedTuple):
    """A matrix A of shape (tokens, n), kept as A~_i = coefficients_i * generators[assignment_i].

    The paper's C, f, alpha and beta. These four tensors are all that is saved for backward:
    k n + tokens numbers of A's dtype, tokens small integers and one fp32 number.
    """

    generators: Float[Tensor, "k n"]  # C: rows of A
    assignment: Integer[Tensor, " tokens"]  # f: which generator stands for a row
    coefficients: Float[Tensor, " tokens"]  # alpha: its scale; 0 for a dropped row
    normalization: Float[Tensor, ""]  # beta = b / (b - dropped), on the device


def assignment_dtype(generators: int) -> torch.dtype:
    """The smallest integer type that numbers ``generators`` rows."""
    if generators <= 1 << 8:
        return torch.uint8
    return torch.int16 if generators <= 1 << 15 else torch.int32


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums and norms are taken in fp32, or in fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
