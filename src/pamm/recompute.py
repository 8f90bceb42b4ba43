"""The exact way to the same memory: X is computed again in backward, from the norm's input.

Where a cheap module without randomness (a norm) makes X, X need not be kept: its input h is enough.
The module keeps h in place of everything its own backward needs, and the linear layers that read X
keep nothing at all. In backward the first of them that runs computes X again, once, together with
what the module's own backward needs; the others find it there.

Gradients are those of exact training, bit for bit. Under torch.compile the module is checkpointed
in the graph, and the compiler computes X again for its readers by itself, from one number a token
that it keeps as exact training does: 1 / the norm, so that no sum is taken again.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pamm.autograd import even
from pamm.functional import autocast_dtype
from pamm.nn import is_pamm, warn_if_frozen
from pamm.swap import Swapped, restore, swap


class _Kept(NamedTuple):
    """A tensor kept for backward. Autograd does not check what hooks keep; this does."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Kept":
        return cls(tensor, tensor._version)

    def unchanged(self) -> Tensor:
        """The tensor; an error if it was written to since."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that is needed for the gradient was "
                f"modified by an inplace operation: it is at version {self.tensor._version}, "
                f"expected version {self.version}. Call backward before weights are changed."
            )
        return self.tensor


class _Again(NamedTuple):
    """In place of X, or of a cast or copy of it."""

    dtype: torch.dtype
    shape: torch.Size


Packed = tuple["Recomputation", int]

_OTHERWISE = (
    "leave its group out of the conversion (exclude), or convert it with a method that keeps "
    "something of X, such as PammConfig('subspace')."
)


class _Keep(torch.autograd.Function):
    """The identity on X, which saves h in the way that hooks (offloading, counting) see.

    The node of X in the graph, by which its readers find how to make it again.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, h: Tensor, recomputation: "Recomputation"
    ) -> Tensor:
        ctx.save_for_backward(h)
        ctx.recomputation = recomputation
        return x.view_as(x)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.recomputation.output(ctx)  # while h is there: the module's own backward comes next
        ctx.recomputation.forget()  # all readers have run
        return grad, None, None


class Recomputation:
    """One output of a module, which is made again from the module's input in backward.

    Args:
        function: the module's forward; the same input gives the same output.
        module: its parameters and attributes must be the same in backward.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], module: nn.Module) -> None:
        self._function, self._module = function, module
        self._kept = [_Kept.of(weight) for weight in module.parameters()]
        self._count = 0
        self._saved: dict[int, Tensor] = {}
        self._again: Tensor | None = None

    def run(self, h: Tensor) -> Tensor:
        """The output, of which neither it nor what its backward needs is kept; h is."""
        self._needs_grad, self._autocast = h.requires_grad, _autocast(h.device.type)
        before = _attributes(self._module)
        with saved_tensors_hooks(self._pack, _unpack):
            x = self._function(h)
        # Without those that the module itself sets: what it notes down is no input.
        after = _attributes(self._module)
        self._attributes = {name: now for name, now in after.items() if before.get(name) is now}
        self._shape, self._stride = x.shape, x.stride()
        return _Keep.apply(x, h, self)

    def output(self, keeper: Any) -> Tensor:
        """The output, computed again if it is not there; ``keeper`` is its node in the graph."""
        if self._again is None:
            (h,) = keeper.saved_tensors
            self._recompute(h)
        assert self._again is not None
        return self._again

    @property
    def _name(self) -> str:
        return type(self._module).__bases__[1].__name__

    def forget(self) -> None:
        """Let go of the output; what the module's own backward needs stays for it."""
        self._again = None

    def saved(self, number: int) -> Tensor:
        """Tensor ``number`` of those that the module's own backward needs; each is asked once, and
        let go of: a loss that is held holds this object.
        """
        if number not in self._saved:
            raise RuntimeError(
                f"a saved tensor of {self._name} was read twice, and its input is made again "
                f"once in backward. To read it as often as you like, {_OTHERWISE}"
            )
        return self._saved.pop(number)

    def _pack(self, tensor: Tensor) -> "Packed | _Kept":
        if isinstance(tensor, nn.Parameter):
            return _Kept.of(tensor)
        self._count += 1
        return self, self._count - 1

    def _recompute(self, h: Tensor) -> None:
        weights, now = list(self._module.parameters()), _attributes(self._module)
        for name, was in self._attributes.items():
            if not _same(now.get(name), was):
                raise RuntimeError(
                    f"{name!r} of {self._name} is another than in the forward pass, from which its "
                    "output must be made again. Call backward before it is changed, or "
                    f"{_OTHERWISE}"
                )
        if [id(weight) for weight in weights] != [id(kept.unchanged()) for kept in self._kept]:
            raise RuntimeError(
                f"the weights of {self._name} are not those of the forward pass, from which "
                "its output must be made again. Call backward before weights are exchanged; give "
                "torch.func.functional_call tensors that are no nn.Parameter."
            )
        saved: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                saved.append(tensor.detach())
            # Not the tensor itself: a graph that keeps its own output is never freed.
            return tensor.detach()

        h = h.detach().requires_grad_(self._needs_grad)
        with (
            torch.enable_grad(),
            self._autocast(),
            saved_tensors_hooks(collect, lambda tensor: tensor),
        ):
            again = self._function(h).detach()
        if len(saved) != self._count or again.shape != self._shape:
            raise RuntimeError(
                f"{self._name} computes something else in backward than in the forward pass: its "
                f"output depends on more than its input. To train it, {_OTHERWISE}"
            )
        if again.stride() != self._stride:  # h came back from a hook with others
            again = torch.empty_strided(
                again.shape, self._stride, dtype=again.dtype, device=again.device
            ).copy_(again)
        self._again, self._saved = again, dict(enumerate(saved))


def _attributes(module: nn.Module) -> dict[str, object]:
    """Of the module and what is in it: neither what they registered, nor what PyTorch has there."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if not name.startswith("_") and name != "training"
    }


def _same(one: object, other: object) -> bool:
    """The same thing, or an equal number or text."""
    return one is other or (isinstance(other, int | float | str) and one == other)


def _autocast(device: str) -> Callable[[], AbstractContextManager[object]]:
    """A context with autocast as it is now: backward runs outside of it."""
    if device == "meta":
        return nullcontext
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if enabled else None
    return functools.partial(torch.autocast, device, dtype, enabled)


def _unpack(packed: "Packed | _Kept") -> Tensor:
    if isinstance(packed, _Kept):
        return packed.unchanged()
    recomputation, number = packed
    return recomputation.saved(number)


def _policy(_: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    """Keep what is one number a token, and nothing else."""
    is_scale = op is torch.ops.aten.rsqrt.default and args[0].shape[-1:] == (1,)
    return CheckpointPolicy.MUST_SAVE if is_scale else CheckpointPolicy.MUST_RECOMPUTE


_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, _policy)


class Recomputed(Swapped):
    """Mixed into the class of the module that makes X: its output is made again in backward."""

    pamm_group_names: set[str]
    """Of the groups that read it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's own forward; of one tensor the output is made again."""
        plain = super().forward  # type: ignore[misc]
        is_one = len(args) == 1 and not kwargs
        if not (is_one and self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        (h,) = args
        if torch.compiler.is_compiling():
            # Readers would make a copy of an uneven X outside, which the compiler would keep.
            again = lambda h: even(plain(h))  # noqa: E731
            return checkpoint(again, h, use_reentrant=False, context_fn=_CONTEXTS)  # type: ignore[return-value]
        if not self._keeps_its_weights():
            return plain(h)
        return Recomputation(plain, self).run(h)

    def _keeps_its_weights(self) -> bool:
        """Whether backward finds them as they are: not under ``functional_call``, nor where FSDP2
        shards this very module."""
        is_sharded = any(base.__name__ == "FSDPModule" for base in type(self).__mro__)
        return not is_sharded and all(isinstance(p, nn.Parameter) for p in self.parameters())


def _hooks_around() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Those that autograd would save with here. PyTorch has no public name for them (2.13): without
    this one they are passed over, and what they would let go of is kept."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)  # type: ignore[attr-defined]
    return top(False)  # type: ignore[no-any-return]


def storage_id(tensor: Tensor) -> int:
    """Which storage this is a view of. Not its address, which all on ``meta``, and all that are
    empty, have in common."""
    return tensor.untyped_storage()._cdata


class Recomputing(Swapped):
    """Mixed into a linear layer's class: it keeps no input that a ``Recomputed`` module made."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    pamm_group_name: str
    pamm_readers: list[nn.Module]

    __reduce_ex__ = Swapped.__reduce_ex__  # not that of a class below, which can be imported

    def forward(self, input: Tensor) -> Tensor:
        """x W.T + bias."""
        plain = super().forward  # type: ignore[misc]
        if is_pamm(self) or torch.compiler.is_compiling():
            return plain(input)  # a PAMM layer first takes the cast that its group shares
        if not (self.weight.requires_grad and torch.is_grad_enabled()):
            warn_if_frozen(self, self.pamm_readers)
            return plain(input)
        cast = input.to(autocast_dtype(input))
        read = even(cast) if isinstance(self, nn.Linear) else cast
        with self._saving(input, read):
            if read is cast:
                return plain(cast)
            y = F.linear(read, self.weight)  # as F.linear would, but of a copy that is known here
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _saving(self, input: Tensor, kept: Tensor) -> AbstractContextManager[object]:
        """X is not saved, as it is, cast or copied: backward asks for it again."""
        # Without a gradient (the first block above a frozen embedding) X has no node that keeps h.
        # Of an X that was written to since, autograd gives none, with an error.
        keeper: Any = None if torch.compiler.is_compiling() else input.grad_fn
        number = input.output_nr
        while type(keeper).__name__ == "BackwardHookFunctionBackward":  # of a full backward hook
            keeper, number = keeper.next_functions[number]
        made = getattr(keeper, "recomputation", None)
        if not isinstance(made, Recomputation):
            return nullcontext()
        made_again = {storage_id(input), storage_id(kept)}
        # All else goes to the hooks around (checkpointing, offloading), if there are any.
        keep, give = _hooks_around() or (_Kept.of, _Kept.unchanged)

        def pack(tensor: Tensor) -> Any:
            if storage_id(tensor) not in made_again:
                return keep(tensor)
            return _Again(tensor.dtype, tensor.shape)

        def unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _Again):
                return give(packed)
            return made.output(keeper).to(packed.dtype).reshape(packed.shape)

        return saved_tensors_hooks(pack, unpack)

    def extra_repr(self) -> str:
        """Shapes, and which group it is in: printing the model shows what was converted."""
        group = f"group={self.pamm_group_name}"
        below = super().extra_repr().removesuffix(f", {group}")  # if it is a PAMM layer as well
        return ", ".join(filter(None, (below, group, "recomputed")))

    __repr__ = nn.Module.__repr__


def attach(source: nn.Module, readers: Iterable[nn.Module], name: str = "") -> None:
    """Let ``readers``, the group ``name``, take their input from ``source`` again, in place."""
    if not isinstance(source, Recomputed):  # which may feed several groups
        swap(source, Recomputed)
        source.pamm_group_names = set()  # type: ignore[assignment]
    source.pamm_group_names.add(name)  # type: ignore[union-attr, operator]
    readers = list(readers)
    for reader in readers:
        swap(reader, Recomputing)
        reader.pamm_group_name, reader.pamm_readers = name, readers  # type: ignore[assignment]


def detach(model: nn.Module) -> int:
    """Undo every ``attach`` in ``model``; returns the number of readers there were."""
    readers = 0
    for module in model.modules():
        if isinstance(module, Recomputing):
            del module.pamm_group_name, module.pamm_readers
            readers += 1
        elif isinstance(module, Recomputed):
            del module.pamm_group_names
        else:
            continue
        restore(module)
    return readers


def left_unread(model: nn.Module, readers: Iterable[nn.Module]) -> dict[str, Recomputed]:
    """What would make X again for no one without these ``readers``, by name."""
    gone = {reader for reader in readers if isinstance(reader, Recomputing)}
    names = {reader.pamm_group_name for reader in gone}
    others = (m for m in model.modules() if isinstance(m, Recomputing) and m not in gone)
    still_read = {reader.pamm_group_name for reader in others}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Recomputed)
        and module.pamm_group_names & names
        and not module.pamm_group_names & still_read
    }


def group_layers(model: nn.Module) -> dict[str, list[str]]:
    """Names of the layers of every converted group, under the group's name."""
    layers: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if is_pamm(module):
            layers.setdefault(module.pamm_group.name, []).append(name)
    return layers | recomputed_groups(model)


def recomputed_groups(model: nn.Module) -> dict[str, list[str]]:
    """Names of the layers of every group whose input is recomputed, under the group's name."""
    layers: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Recomputing):
            layers.setdefault(module.pamm_group_name, []).append(name)
    return layers
