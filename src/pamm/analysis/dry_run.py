"""One training step without weights, values or a GPU: what is kept for backward, and the peak.

The model is on the ``meta`` device (``pamm.weightless``), so one of any size runs in seconds and in
no memory.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pamm.analysis.like_cuda import LikeCuda
from pamm.recompute import storage_id
from pamm.weightless import Weightless


class Compressed(NamedTuple):
    """Layers that would keep a state in place of their common input."""

    layers: frozenset[str]
    state_bytes: Callable[[int], int]
    """Of the state, for so many rows of input."""
    source: str | None = None
    """The module that would make the input again in backward, and keep its own for that."""


@dataclasses.dataclass
class Kept:
    """A piece of memory that is kept from forward until backward."""

    bytes: int
    keepers: set[str]
    """Names of the modules that keep it."""
    is_weight: bool
    """Whether it is autocast's copy of a Parameter."""


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What one training step keeps, in bytes; Parameters themselves are not in it."""

    kept: tuple[Kept, ...]
    """Everything that is kept for backward, each piece of memory once."""
    rows: Mapping[str, int]
    """Rows of the input that each linear layer received."""
    inputs: Mapping[str, frozenset[int]]
    """Which pieces of ``kept`` are the inputs that a linear layer received, by its name."""
    peak: int
    """The most that was alive at a time, in forward and backward, gradients included."""

    @property
    def saved(self) -> int:
        """Bytes kept from forward until backward."""
        return sum(each.bytes for each in self.kept)

    @property
    def weight_copies(self) -> int:
        """Bytes of these that are autocast's copies of Parameters."""
        return sum(each.bytes for each in self.kept if each.is_weight)

    def freed(self, layers: set[str]) -> int:
        """Bytes of inputs that are kept by these layers and by no one else."""
        return sum(
            each.bytes for each in self.kept if each.keepers <= layers and not each.is_weight
        )

    def read(self, layers: set[str]) -> int:
        """Bytes of inputs of these layers, whoever keeps them."""
        numbers = {number for layer in layers for number in self.inputs.get(layer, ())}
        return sum(self.kept[number].bytes for number in numbers)

    def below(self, prefix: str) -> int:
        """Bytes kept by a module or by modules in it."""
        dot = f"{prefix}."
        return sum(
            each.bytes
            for each in self.kept
            if any(f"{name}.".startswith(dot) for name in each.keepers)
        )

    def others(self, layers: set[str]) -> set[str]:
        """Who else keeps an input of these layers."""
        kept = [self.kept[number] for layer in layers for number in self.inputs.get(layer, ())]
        return {name for each in kept for name in each.keepers} - layers


def dry_run(
    model: nn.Module,
    loss: Callable[[], Tensor],
    autocast: torch.dtype | None = None,
    compressed: Iterable[Compressed] = (),
) -> DryRun:
    """Run one forward and backward pass of ``model``, all of its tensors on ``meta``.

    Memory is counted as PyTorch's allocator on CUDA would hand it out, without the rounding of
    blocks, the libraries' own workspaces and what one kernel needs for itself.

    Args:
        model: in the mode to look at. Gradients that it has are removed.
        loss: one forward pass; gives the loss.
        autocast: the dtype to compute in, as CUDA's autocast does it; ``None`` is without.
        compressed: groups of the model, not converted, that keep a state in place of their input.

    Examples:
        >>> model = nn.Linear(8, 8, device="meta")
        >>> dry_run(model, lambda: model(torch.empty(100, 8, device="meta")).sum()).saved
        3200
    """
    model.zero_grad(set_to_none=True)
    memory = _Memory(model)
    with ExitStack() as stack:
        cuda = stack.enter_context(LikeCuda(autocast))
        watch = _Watch(model, memory, cuda, compressed)
        stack.callback(watch.end)
        stack.enter_context(Weightless(after=memory.meet))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        with saved_tensors_hooks(watch.pack, watch.unpack):
            result = loss()
        places = {number: place for place, number in enumerate(watch.kept)}
        copies = watch.copies()
        kept = tuple(Kept(*each, number in copies) for number, each in watch.kept.items())
        watch.forget()
        cuda.weight_copies.clear()
        result.backward()
        del result
    model.zero_grad(set_to_none=True)
    inputs = {
        name: frozenset(places[number] for number in numbers if number in places)
        for name, numbers in watch.inputs.items()
    }
    return DryRun(kept, watch.rows, inputs, memory.peak)


class _Memory:
    """Bytes alive now and at most, the model's own not counted."""

    def __init__(self, model: nn.Module) -> None:
        self.now = self.peak = 0
        self._counting = True
        self._count = 0
        self._alive: dict[int, tuple[int, Any]] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._alive[storage_id(tensor)] = -1, None

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """What is made inside takes no memory."""
        self._counting = False
        yield
        self._counting = True

    def meet(self, tensor: Tensor) -> int:
        """Count the memory of a tensor until it dies; its number, -1 for the model's own."""
        address = storage_id(tensor)
        if address in self._alive:
            return self._alive[address][0]
        storage = tensor.untyped_storage()
        size = storage.nbytes() if self._counting else 0

        def died(_: object) -> None:
            self.now -= size
            del self._alive[address]

        self._count += 1
        self._alive[address] = self._count, weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)
        return self._count


class _Again:
    """One run of a module that makes its output again in backward: what is let go of for that."""

    def __init__(self, input: Tensor) -> None:
        self.input = input
        self.output: int | None = None
        """Its number, once it is there."""
        self._sizes: dict[int, tuple[int, torch.dtype]] = {}
        self._made: dict[int, Tensor] | None = None

    def let_go(self, number: int, tensor: Tensor) -> None:
        """Of the output, or of what the module's own backward needs."""
        bytes = tensor.untyped_storage().nbytes()
        self._sizes[number] = bytes // tensor.element_size(), tensor.dtype

    def make(self, number: int) -> Tensor:
        """One of them; all come back together."""
        if self._made is None:
            self._made = {
                number: self.input.new_empty(size, dtype=dtype)
                for number, (size, dtype) in self._sizes.items()
            }
        if number != self.output:  # the module's own backward: all readers have run
            self._made.pop(self.output, None)  # type: ignore[arg-type]
        return self._made[number]


class _StandIn(NamedTuple):
    """What is kept in place of a tensor."""

    dtype: torch.dtype
    view: tuple[torch.Size, tuple[int, ...], int | torch.SymInt]
    """Shape, strides and offset."""
    state: Tensor | None = None
    """Of the compressed group whose input it is."""
    again: _Again | None = None
    """What makes it again; without, it is not needed in backward."""
    number: int = -1
    """Of what is made again: it or, if it is a cast, what was cast."""

    @classmethod
    def of(cls, tensor: Tensor, *more: Any) -> "_StandIn":
        return cls(tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset()), *more)


class _Watch:
    """Hooks that tell which modules keep what."""

    def __init__(
        self, model: nn.Module, memory: _Memory, cuda: LikeCuda, compressed: Iterable[Compressed]
    ) -> None:
        self.kept: dict[int, tuple[int, set[str]]] = {}
        self.inputs: dict[str, set[int]] = {}
        self.rows: dict[str, int] = {}
        self._memory, self._cuda = memory, cuda
        self._group_of = {name: group for group in compressed for name in group.layers}
        self._states: dict[frozenset[str], Tensor] = {}
        self._sources = {group.source for group in self._group_of.values()} - {None}
        self._inputs: dict[str, Tensor] = {}
        self._again: dict[str, _Again] = {}
        self._stays: dict[str, int] = {}
        self._running: list[str] = []
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(self._before(name, module)),
                module.register_forward_hook(self._after),
            ]

    def _before(self, name: str, module: nn.Module) -> Callable[..., None]:
        reads = isinstance(getattr(module, "weight", None), Tensor)

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(name)
            if reads and args and isinstance(args[0], Tensor) and args[0].ndim:
                x = args[0]
                self.inputs.setdefault(name, set()).add(self._memory.meet(x))
                self.rows[name] = x.numel() // max(1, x.shape[-1])
            if name in self._sources and args:
                self._again.pop(name, None)
                self._inputs[name] = args[0]

        return hook

    def _after(self, module: nn.Module, args: object, output: Any) -> None:
        name = self._running.pop()
        if self._inputs.pop(name, None) is None:
            return
        if name in self._again:
            again = self._again[name]
            again.output = self._memory.meet(output)
            again.let_go(again.output, output)
        else:  # it has no backward (all below is frozen) in which to make the output again
            self._stays[name] = output.untyped_storage().nbytes()

    def pack(self, tensor: Tensor) -> Tensor | _StandIn:
        """Called for everything that is kept for backward."""
        number = self._memory.meet(tensor)
        if number < 0:
            return tensor
        keeper = self._running[-1] if self._running else ""
        if number not in self.copies():
            if source := next((name for name in self._running if name in self._inputs), None):
                return self._let_go(source, number, tensor)
            group = self._group_of.get(keeper)
            if group is not None:
                state = self._state(group, self.rows[keeper], tensor)
                again = self._again.get(group.source or "")
                self._keep(state, keeper)
                return _StandIn.of(tensor, state, again, again and again.output)
        self._keep(tensor, keeper)
        return tensor

    def _let_go(self, source: str, number: int, tensor: Tensor) -> Tensor | _StandIn:
        """A source keeps its input, and nothing else; so does what is inside of it."""
        again = self._again.setdefault(source, _Again(self._inputs[source]))
        input = self._memory.meet(again.input)
        if input >= 0:
            self._keep(again.input, source)
        if number == input:
            return tensor
        again.let_go(number, tensor)
        return _StandIn.of(tensor, None, again, number)

    def unpack(self, kept: Tensor | _StandIn) -> Tensor:
        """Called when backward needs it. What is not made again is not needed there."""
        if isinstance(kept, Tensor):
            return kept
        if kept.again is not None:
            made = kept.again.make(kept.number)
            if made.dtype == kept.dtype:
                return made.as_strided(*kept.view)
            return made.new_empty(kept.view[0], dtype=kept.dtype)
        assert kept.state is not None
        with self._memory.not_counting():
            return kept.state.new_empty(kept.view[0], dtype=kept.dtype)

    def _state(self, group: Compressed, rows: int, x: Tensor) -> Tensor:
        """One for the whole group."""
        if group.layers not in self._states:
            source = group.source or ""
            stays = 0 if source in self._again else self._stays.get(source, 0)
            size = group.state_bytes(rows) + stays
            self._states[group.layers] = x.new_empty(size, dtype=torch.uint8)
        return self._states[group.layers]

    def _keep(self, tensor: Tensor, keeper: str) -> None:
        size = tensor.untyped_storage().nbytes()
        self.kept.setdefault(self._memory.meet(tensor), (size, set()))[1].add(keeper)

    def copies(self) -> set[int]:
        """Numbers of autocast's copies of Parameters."""
        return {self._memory.meet(copy) for copy in self._cuda.weight_copies.values()}

    def forget(self) -> None:
        """Let go of the states: backward frees them as it goes."""
        self._states.clear()
        self._again.clear()

    def end(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
