"""The exact way to the same memory: X is computed again in backward, from the norm's input.

Where a cheap module without randomness (a norm) makes X, X need not be kept: its input h is enough.
The module keeps h in place of everything its own backward needs, and the linear layers that read X
keep nothing at all. In backward the first of them that runs computes X again, once, together with
what the module's own backward needs; the others find it there.

Gradients are those of exact training, bit for bit. Under torch.compile the module is checkpointed
in the graph, and the compiler computes X again for its readers by itself.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pamm.functional import cast_like_autocast
from pamm.swap import Swapped, restore, swap

Packed = tuple["Recomputation", int]


class _Keep(torch.autograd.Function):
    """The identity on X, which saves h in the way that hooks (offloading, counting) see."""

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
        return grad, None, None


class Recomputation:
    """One output of a module, which is made again from the module's input in backward.

    Args:
        function: the module's forward; the same input gives the same output.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self._count = 0
        self._saved: dict[int, Tensor] = {}
        self._again: Tensor | None = None

    def run(self, h: Tensor) -> Tensor:
        """The output, of which neither it nor what its backward needs is kept; h is."""
        self._needs_grad = h.requires_grad
        with saved_tensors_hooks(self._pack, _unpack):
            x = self._function(h)
        x = _Keep.apply(x, h, self)
        self._made, self._version = weakref.ref(x), x._version
        return x

    def made(self, x: Tensor) -> bool:
        """Whether ``x`` is the output, as it was made."""
        return self._made() is x and self._version == x._version

    def output(self, keeper: Any) -> Tensor:
        """The output, computed again if it is not there; ``keeper`` is its node in the graph."""
        if self._again is None:
            (h,) = keeper.saved_tensors
            self._recompute(h)
        assert self._again is not None
        return self._again

    def saved(self, number: int) -> Tensor:
        """Tensor ``number`` of those that the module's own backward needs; each is asked once."""
        tensor = self._saved.pop(number)
        if not self._saved:  # the module's own backward comes last
            self._again = None
        return tensor

    def _pack(self, tensor: Tensor) -> "Packed | Tensor":
        if isinstance(tensor, nn.Parameter):
            return tensor
        self._count += 1
        return self, self._count - 1

    def _recompute(self, h: Tensor) -> None:
        saved: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                saved.append(tensor.detach())
            # Not the tensor itself: a graph that keeps its own output is never freed.
            return tensor.detach()

        h = h.detach().requires_grad_(self._needs_grad)
        with torch.enable_grad(), saved_tensors_hooks(collect, lambda tensor: tensor):
            self._again = self._function(h).detach()
        self._saved = dict(enumerate(saved))


def _unpack(packed: "Packed | Tensor") -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    recomputation, number = packed
    return recomputation.saved(number)


class Recomputed(Swapped):
    """Mixed into the class of the module that makes X: its output is made again in backward."""

    pamm_current: Recomputation | None

    def forward(self, h: Tensor) -> Tensor:
        """The module's own forward."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(h)  # type: ignore[misc]
        plain = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return checkpoint(plain, h, use_reentrant=False)  # type: ignore[return-value]
        self.pamm_current = Recomputation(plain)
        return self.pamm_current.run(h)

    def pamm_made(self, x: Tensor) -> Recomputation | None:
        """How to make ``x`` again, if this module made it last and nothing was written into it."""
        current = self.pamm_current
        return current if current is not None and current.made(x) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pamm_current": None}


class Recomputing(Swapped):
    """Mixed into a linear layer's class: it keeps no input where ``pamm_source`` made it."""

    weight: nn.Parameter
    pamm_source: Recomputed
    pamm_group_name: str

    __reduce_ex__ = Swapped.__reduce_ex__  # not that of a class below, which can be imported

    def forward(self, input: Tensor) -> Tensor:
        """x W.T + bias."""
        plain = super().forward  # type: ignore[misc]
        made = None
        # Without a gradient (the first block above a frozen embedding) X has no node that keeps h.
        if self.weight.requires_grad and input.requires_grad and torch.is_grad_enabled():
            made = self.pamm_source.pamm_made(input)
        if made is None or torch.compiler.is_compiling():
            return plain(input)
        x, *_ = cast_like_autocast(input, self.weight, None)
        address, dtype, keeper = x.untyped_storage().data_ptr(), x.dtype, input.grad_fn

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != address or tensor.dtype != dtype:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            return made.output(keeper).to(dtype).as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            return plain(x)

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
        source.pamm_current = None  # type: ignore[assignment]
    for reader in readers:
        swap(reader, Recomputing)
        # Not as a submodule: names and parameters of the model stay as they are.
        reader.__dict__.update(pamm_source=source, pamm_group_name=name)


def detach(model: nn.Module) -> int:
    """Undo every ``attach`` in ``model``; returns the number of readers there were."""
    readers = 0
    for module in model.modules():
        if isinstance(module, Recomputing):
            del module.__dict__["pamm_source"], module.__dict__["pamm_group_name"]
            readers += 1
        elif isinstance(module, Recomputed):
            del module.pamm_current
        else:
            continue
        restore(module)
    return readers


def recomputed_groups(model: nn.Module) -> dict[str, list[str]]:
    """Names of the layers of every group whose input is recomputed, under the group's name."""
    layers: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Recomputing):
            layers.setdefault(module.pamm_group_name, []).append(name)
    return layers
