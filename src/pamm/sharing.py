"""One compression for each group: q, k and v read one X, so they share one state.

Where they compute in another dtype than X's, they share one cast of X as well.

The second and third reader recognise X by *object identity*, taken before any cast; never by its
address, which another tensor may reuse. A state is used again only if nothing can have changed:

- the same tensor object, alive, with the same version (nothing was written into it);
- the same dtype to compute in;
- by a layer that has not used this state yet. A second call of the same layer is a new forward
  pass and gets a new draw.

The group holds a state no longer than needed: until every member has used it, or X is gone.
After that only autograd's graph holds it.
"""

import dataclasses
import threading
import weakref

import torch
from torch import Tensor, nn

from pamm.compressors import Compressor, State
from pamm.functional import compress_rows
from pamm.stream import Stream


@dataclasses.dataclass
class _Current:
    """A compression that some members have not used yet, and what it was made of."""

    x: "weakref.ref[Tensor]"
    version: int
    dtype: torch.dtype
    """Of what was compressed."""
    casts: dict[torch.dtype, Tensor]
    """X in other dtypes than its own."""
    state: State
    waiting: frozenset[int]


class _Currents(threading.local):
    """Those of a group, by the id of X; for each thread its own.

    Mostly one. Where k and v of a decoder also read the encoder's states, two.
    """

    def __init__(self) -> None:
        self.of: dict[int, _Current] = {}


class Group:
    """All linear layers that read one tensor, with the compressor and the stream they share.

    Args:
        name: the group's name in the model, ``model.layers.0.self_attn.{q_proj,k_proj,v_proj}``.
        layers: its members.
        method: what keeps the state.
        stream: draws the generators.
    """

    def __init__(
        self, name: str, layers: list[nn.Module], method: Compressor, stream: Stream
    ) -> None:
        self.name = name
        self.layers = layers
        self.method = method
        self.stream = stream
        self._currents = _Currents()
        self._traced: frozenset[int] = frozenset()

    def share(self, member: int, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, State]:
        """For layer number ``member``: X in the dtype to compute in, without a gradient if it has
        another; and its state.
        """
        # A cast that is wider than X holds nothing that X does not.
        kept = min((dtype, x.dtype), key=lambda each: each.itemsize)
        if torch.compiler.is_compiling():
            return _cast(x, dtype, {}), self._traced_state(member, _cast(x, kept, {}))
        currents, key = self._currents.of, id(x)
        now = currents.get(key)
        known = (
            now is not None
            and now.x() is x
            and now.version == x._version
            and now.dtype == kept
            and member in now.waiting
        )
        if not known:
            casts: dict[torch.dtype, Tensor] = {}
            state = compress_rows(self.method, _cast(x, kept, casts), self.stream.draw)
            gone = weakref.ref(x, lambda _: currents.pop(key, None))
            waiting = frozenset(range(len(self.layers)))
            now = currents[key] = _Current(gone, x._version, kept, casts, state, waiting)
        assert now is not None
        cast = _cast(x, dtype, now.casts)
        now.waiting -= {member}
        if not now.waiting:
            del currents[key]
        return cast, now.state

    def _traced_state(self, member: int, x: Tensor) -> State:
        """In a compiled graph every member writes the compression down, and the compiler, which
        finds the same operations on the same tensors, keeps one of them. So all must draw the same
        rows: the first to ask draws, the others draw again. A pass is over once all that train have
        asked, or when one asks twice. Then nothing is left that would make the compiler start anew.
        """
        leads = not self._traced or member in self._traced
        asked = frozenset((member,)) if leads else self._traced | {member}
        trained = (i for i, m in enumerate(self.layers) if m.training and m.weight.requires_grad)
        self._traced = frozenset() if asked.issuperset(trained) else asked
        draw = self.stream.draw if leads else self.stream.draw_again
        return compress_rows(self.method, x, draw, advance=leads)

    def move(self, device: torch.device) -> None:
        """Take along what the group carries from step to step."""
        self.stream.move(device)
        self.method.move(device)

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles start without current states: they belong to a forward pass."""
        return {name: value for name, value in vars(self).items() if name != "_currents"}

    def __setstate__(self, values: dict[str, object]) -> None:
        vars(self).update(values, _currents=_Currents())


def _cast(x: Tensor, dtype: torch.dtype, made: dict[torch.dtype, Tensor]) -> Tensor:
    """X in this dtype, without a gradient if it has another; ``made`` has those there are."""
    if x.dtype == dtype:
        return x
    if dtype not in made:
        made[dtype] = x.detach().to(dtype)
    return made[dtype]
