"""One forward pass without weights, to see who receives X, who keeps it and who made it.

A copy of the model runs on the ``meta`` device: its weights have shapes and no values, so nothing
of the model's size is allocated and no arithmetic is done, on whatever device the model is
(``pamm.weightless``).

The model itself is not run: its buffers, hooks, mode and gradients stay as they are, and so do the
global random states.
"""

import contextlib
import copy
import dataclasses
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from pamm.adapters import uncast
from pamm.errors import PammError
from pamm.example import Example, example_of
from pamm.nn import is_linear, is_pamm
from pamm.recompute import detach, storage_id
from pamm.weightless import Weightless

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution}


@dataclasses.dataclass
class Input:
    """A tensor that linear layers received, and all that is known of it."""

    readers: list[str]
    """The linear layers that received this very tensor."""
    keepers: list[str]
    """The modules that keep it, or what shares its memory, for backward; readers included."""
    maker: str | None
    """The module that returned it first."""
    obstacle: str | None
    """Why the maker cannot make it again in backward; None if it can."""
    is_parameter: bool
    """Whether it lies in the memory of a parameter, so that letting go of it frees nothing."""


def probe(model: nn.Module, example: Example | None = None) -> list[Input]:
    """Run ``model`` once, without weights, and tell what linear layers received.

    Args:
        model: any module.
        example: arguments of its forward: one, a tuple, or a mapping of keyword arguments. Without
            it, a model that says what it takes (those of Transformers do) gets what it says; parts
            that it does not run, such as a vision tower, are run by themselves, and so are those of
            a model that cannot run so (CLIP) or of a wrapper that does not say what it takes.

    Raises:
        Exception: of any kind, from the model's own code or from an operation that needs values.
    """
    with _undisturbed():
        twin = _without_weights(model)
        found: list[Input] = []
        ran: set[str] = set()
        problem: Exception | None = None
        parts = [("", twin)] if example is not None else twin.named_modules()
        for name, part in parts:
            inputs = example_of(part) if example is None else example
            if inputs is None or any(_is_below(other, name) for other in ran):
                continue
            try:
                watch = _run(part, name, inputs)
            except Exception as error:
                if example is not None:
                    raise
                problem = problem or error  # this is not seen as a whole; its parts may be
            else:
                found += watch.inputs()
                ran |= watch.ran
        if not ran:
            raise problem or PammError(
                "this model does not say what it takes; give convert an example of it"
            )
    return found


def _is_below(name: str, module: str) -> bool:
    """Whether ``name`` is this module or in it."""
    return not module or f"{name}.".startswith(f"{module}.")


def _own(tensor: Tensor) -> Tensor:
    """A copy on the CPU; what has no values stays without."""
    return tensor.detach().to("meta" if tensor.is_meta else "cpu", copy=True)


def _run(module: nn.Module, name: str, example: Example) -> "_Watch":
    watch = _Watch(module, name)
    example = dict(example) if isinstance(example, Mapping) else example
    example = tree_map_only(Tensor, _own, example)
    try:
        with Weightless(before=watch.operation), saved_tensors_hooks(watch.pack, lambda kept: kept):
            if isinstance(example, dict):
                module(**example)
            else:
                module(*((example,) if isinstance(example, Tensor) else example))
    finally:
        watch.end()
    return watch


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy in training mode, unconverted, without hooks, its weights on ``meta``."""
    memo: dict[int, Any] = {}
    dtypes = uncast(model)
    for parameter in model.parameters():
        dtype = dtypes.get(id(parameter), parameter.dtype)
        shape = torch.empty(parameter.shape, dtype=dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        device = "meta" if buffer.is_floating_point() or buffer.is_meta else "cpu"
        memo[id(buffer)] = buffer.detach().to(device, copy=True)
    twin = copy.deepcopy(model, memo)
    detach(twin)
    for module in twin.modules():
        if is_pamm(module):
            module.release()
        for hooks in ("_forward", "_forward_pre", "_backward", "_backward_pre"):
            getattr(module, f"{hooks}_hooks").clear()
        module._compiled_call_impl = None
        # Activation checkpointing hides who keeps what.
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
        # Fused attention needs a GPU; how it is computed changes nothing for X.
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
            config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    return twin.train()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Gradients on, autocast off; random states as before afterwards; no compiler."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    compiler = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:
        compiler = torch.compiler.set_stance("force_eager")
    try:
        with (
            compiler,
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            warnings.simplefilter("ignore")  # the model will say it again when it is trained
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])


class _Call:
    """A module that is running, and what speaks against running it again in backward."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        only = args[0] if len(args) == 1 and not kwargs else None
        is_plain = isinstance(only, Tensor) and only.is_floating_point()
        self.obstacle = None if is_plain else "does not take one tensor"


class _Watch:
    """Hooks of a copy of the model, and what they saw."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.ran: set[str] = set()
        self._running: list[_Call] = []
        self._alive: list[Tensor] = []  # so that no id is given to another tensor
        self._known: set[int] = set()
        self._made: dict[int, tuple[str, str | None]] = {}
        self._versions: list[tuple[str, str, Tensor, int]] = []
        self._latest: dict[str, int] = {}
        self._inputs: dict[int, tuple[Tensor, Input]] = {}
        self._kept: dict[int, list[str]] = {}
        self._parameters = {storage_id(parameter) for parameter in model.parameters()}
        self._buffers = {storage_id(buffer) for buffer in model.buffers()}
        self._hooks = []
        for full, module in model.named_modules(prefix=name):
            before = self._before(full, module)
            self._hooks += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(self._after(full)),
            ]

    def end(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def inputs(self) -> list[Input]:
        """What the linear layers received, in the order they did. Forgets all tensors."""
        changed = {
            name: obstacle
            for name, obstacle, tensor, was in self._versions
            if tensor._version != was
        }
        for tensor, found in self._inputs.values():
            found.obstacle = found.obstacle or changed.get(found.maker or "")
            found.keepers = list(dict.fromkeys(self._kept.get(storage_id(tensor), ())))
        inputs = [found for _, found in self._inputs.values()]
        # The graph holds this object: no garbage collector sees that cycle.
        for seen in (self._alive, self._versions, self._inputs):
            seen.clear()
        return inputs

    def pack(self, tensor: Tensor) -> Tensor:
        """Called for everything that is kept for backward."""
        self._alive.append(tensor)
        name = self._running[-1].name if self._running else ""
        self._kept.setdefault(storage_id(tensor), []).append(name)
        return tensor.detach()  # an output that its own graph holds would never die

    def operation(self, func: Any, tensors: list[Tensor]) -> None:
        """Called for every operation, before it runs."""
        obstacle = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            obstacle = "draws random numbers"
        elif func._overloadpacket in PRODUCTS:
            obstacle = "multiplies matrices"
        elif func._schema.is_mutable and any(storage_id(t) in self._buffers for t in tensors):
            obstacle = "changes its buffers"
        if obstacle:
            for call in self._running:
                call.obstacle = call.obstacle or obstacle

    def _before(self, name: str, module: nn.Module) -> Any:
        reads = is_linear(module)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = (*args, *kwargs.values())
            self.ran.add(name)
            self._running.append(_Call(name, args, kwargs))
            for tensor in given:
                if isinstance(tensor, Tensor):
                    self._meet(tensor)
                    self._versions.append(
                        (name, "takes what is written to afterwards", tensor, tensor._version)
                    )
            if reads and given and isinstance(given[0], Tensor):
                self._read(name, given[0])

        return hook

    def _after(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            obstacle = self._running.pop().obstacle
            if not isinstance(output, Tensor):
                obstacle = "does not return one tensor"
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and self._meet(tensor):
                    self._made[id(tensor)] = name, obstacle
                    self._versions.append(
                        (name, "returns what is written to afterwards", tensor, tensor._version)
                    )
                    self._latest[name] = id(tensor)

        return hook

    def _meet(self, tensor: Tensor) -> bool:
        """Whether this tensor was not seen before."""
        if id(tensor) in self._known:
            return False
        self._known.add(id(tensor))
        self._alive.append(tensor)
        return True

    def _read(self, name: str, x: Tensor) -> None:
        maker, obstacle = self._made.get(id(x), (None, None))
        if maker is not None and self._latest[maker] != id(x):
            obstacle = obstacle or "runs again before its output is read"
        new = Input([], [], maker, obstacle, storage_id(x) in self._parameters)
        _, found = self._inputs.setdefault(id(x), (x, new))
        if name not in found.readers:
            found.readers.append(name)
        found.obstacle = found.obstacle or obstacle
