"""X made again in backward, for layers that take X before a cast of it: LoRA's ``lora_A``."""

import torch
from jaxtyping import Float
from torch import Tensor

from pamm.compressors.exact import Exact
from pamm.compressors.protocol import State
from pamm.stream import Draw


class Recompute(Exact):
    """Keeps nothing: X follows the state (``needs_x``), and is what the gradient is taken from."""

    needs_x = True

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        """Nothing."""
        return ()

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        """None."""
        return 0
