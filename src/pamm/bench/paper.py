"""The paper's algorithms 1 to 3 operation by operation: the baseline of our own kernels.

Rows drawn by a permutation of all tokens, norms and cosines of all rows, assignment by argmax,
``index_add_`` in backward, and one compression for each of q, k and v.
"""

import torch
from torch import Tensor, nn

from pamm.compressors import Memoryless, State
from pamm.config import PammConfig
from pamm.nn import PammLinear
from pamm.sharing import Group
from pamm.stream import Draw, Stream


class PaperPamm(Memoryless):
    """The listing, with the absolute cosine that Lemma 1 needs; eps is infinite."""

    def __init__(self, config: PammConfig) -> None:
        self.config = config

    def compress(self, x: Tensor, draw: Draw) -> State:
        """C, f and alpha."""
        del draw
        index = torch.randperm(len(x), device=x.device)[: self.config.generators(len(x))]
        generators = x[index]
        norm = x.norm(dim=1)
        norm_of_generators = norm[index]
        cosine = (x @ generators.T) / (norm[:, None] * norm_of_generators)
        best = cosine.abs().argmax(dim=1)
        size = cosine.gather(1, best[:, None]).squeeze(1)
        return generators, best, size * norm / norm_of_generators[best]

    def weight_grad(self, state: State, grad: Tensor) -> Tensor:
        """(C.T @ B~).T, B~ by index_add."""
        generators, best, alpha = state
        scaled = alpha[:, None] * grad
        b_tilde = grad.new_zeros(len(generators), grad.shape[1]).index_add_(0, best, scaled)
        return b_tilde.T @ generators

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """C and alpha in X's dtype, f in int64."""
        k = self.config.generators(tokens)
        return (k * in_features + tokens) * dtype.itemsize + tokens * torch.int64.itemsize


def without_sharing(model: nn.Module, config: PammConfig) -> None:
    """Give every converted layer a group of its own and the paper's operations."""
    for name, layer in model.named_modules():
        if isinstance(layer, PammLinear):
            group = Group(name, [layer], PaperPamm(config), Stream(config.seed, name))
            PammLinear.adopt(layer, group, 0)
