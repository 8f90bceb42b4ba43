"""The private random stream: which rows become generators, without torch's global random state."""

import operator
import zlib
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from pamm import ops
from pamm.config import check_backend, whole_number
from pamm.errors import PammError

Draw = Callable[[int, int, torch.device], Tensor]
"""Of (tokens, k, device): k of ``tokens`` row numbers, distinct. Such as ``Stream.draw``."""


class Stream:
    """Draws of one group: ``draw`` gives the next k of ``tokens`` rows.

    A draw is a pure function of (seed, name, rank, position) (``pamm.permutation``): torch's global
    random state is neither read nor changed, so dropout masks stay those of exact training. The
    position and the key lie on the device: drawing never waits for the host, works in a captured
    graph, and layers that differ in nothing else share one compiled graph. Ranks of
    ``torch.distributed`` draw different rows.

    Args:
        seed: the same seed gives the same draws.
        name: separates the streams of a model's groups.
        backend: as in ``PammConfig``; all backends give the same draws.
        device: where it will draw; it moves if asked to draw elsewhere.

    Raises:
        PammError: for a seed or a backend that a ``PammConfig`` would refuse.

    Examples:
        >>> Stream(seed=1).draw(tokens=8, k=3, device=torch.device("cpu")).shape
        torch.Size([3])
    """

    def __init__(
        self,
        seed: int = 0,
        name: str = "",
        backend: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        whole_number("seed", seed, least=0)
        check_backend(backend)
        key = zlib.crc32(f"{seed} {name}".encode()), zlib.crc32(f"{name} {seed}".encode())
        # The position, and two words of a key.
        self._state = torch.tensor([0, *key], device="cpu" if _is_nowhere(device) else device)
        self._backend = backend
        # Which rows are no padding (pamm.padding); None where that is not known, or of no use.
        self.valid: Tensor | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy draws by itself, also one that another process got in shared memory."""
        vars(self).update(state)
        self._state = self._state.clone()

    @property
    def position(self) -> int:
        """Where the stream stands. Waits for the device."""
        return int(self._state[0])

    def draw(self, tokens: int, k: int, device: torch.device) -> Int64[Tensor, " k"]:
        """The next k row numbers, uniform without replacement.

        Raises:
            PammError: if there are fewer than k, or k is negative.
        """
        self.move(device)
        if torch.compiler.is_compiling():  # the compiler writes the addition into the graph
            self._state[0].add_(1)
            return self.draw_again(tokens, k, device)
        count = self._count(tokens, k)
        return self._first(ops.draw_next(self._state, _rank(), tokens, count, self._backend), k)

    def draw_again(self, tokens: int, k: int, device: torch.device) -> Int64[Tensor, " k"]:
        """The rows that the last ``draw`` gave."""
        self.move(device)
        count = self._count(tokens, k)
        return self._first(ops.draw(self._state, _rank(), tokens, count, self._backend), k)

    def _count(self, tokens: int, k: int) -> int:
        """How many rows to draw: all of them where only some may be taken."""
        if not torch.compiler.is_compiling() and not 0 <= k <= tokens:
            raise PammError(f"k is {k}, of {tokens} rows; draw 0 or more, and at most all of them.")
        return k if self.valid is None or len(self.valid) != tokens else tokens

    def _first(self, rows: Tensor, k: int) -> Tensor:
        """The first k of ``rows`` that are no padding; padding only where there are fewer.

        A draw is the beginning of a permutation, so these are uniform too, and the same rows as
        ever where nothing is padding. A stable sort, for an index by a mask waits for the device.
        """
        if self.valid is None or len(rows) == k:
            return rows
        is_padding = ~self.valid.to(rows.device)[rows]
        return rows[is_padding.to(torch.uint8).argsort(stable=True)[:k]]

    def seek(self, step: int) -> None:
        """Go to the first draw of training step ``step``; each step has room for 2^32 draws."""
        self._state[0].fill_(check_step(step) << 32)

    def move(self, device: torch.device) -> None:
        """Draw on this device from now on."""
        if self._state.device != device and not _is_nowhere(device):
            self._state = self._state.to(device)


def check_step(step: Any) -> int:
    """The number of a step, of any integer type; an error if it is none."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise PammError(
            f"step is {step!r}; give the number of the training step, a whole number, 0 or above."
        )
    return number


def _is_nowhere(device: torch.device | None) -> bool:
    """Whether it is none, or tensors there have no values; the stream keeps its own elsewhere."""
    return device is None or device.type == "meta"


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0
