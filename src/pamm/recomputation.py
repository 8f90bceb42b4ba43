"""One output of a module, made again in backward from the module's input: as it was, bit for bit.

The module runs again with the input, the autocast and the attributes of its forward pass; what its
own backward needs comes from that second run as well.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pamm.swap import original


class Kept(NamedTuple):
    """A tensor kept for backward. Autograd does not check what hooks keep; this does."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Kept":
        return cls(tensor, tensor._version)

    @property
    def is_unchanged(self) -> bool:
        """Whether it was not written to since."""
        return self.tensor._version == self.version

    def unchanged(self) -> Tensor:
        """The tensor; an error if it was written to since."""
        if not self.is_unchanged:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that is needed for the gradient was "
                f"modified by an inplace operation: it is at version {self.tensor._version}, "
                f"expected version {self.version}. Call backward before weights are changed."
            )
        return self.tensor


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
        module: its parameters must be the same in backward. Its attributes are put back for that.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], module: nn.Module) -> None:
        self._function, self._module = function, module
        self._kept = [Kept.of(weight) for weight in module.parameters()]
        self._weights = {id(kept.tensor) for kept in self._kept}
        self._count = 0
        self._saved: dict[int, Tensor] = {}
        self._again: Tensor | None = None

    def run(self, h: Tensor) -> Tensor:
        """The output, of which neither it nor what its backward needs is kept; h is."""
        self._needs_grad, self._autocast = h.requires_grad, _autocast(h.device.type)
        self._attributes = _attributes(self._module)
        with saved_tensors_hooks(self._pack, _unpack):
            x = self._function(h)
        for _, was in self._attributes:  # what the module itself writes to is no input
            for name in [n for n, v in was.items() if isinstance(v, Kept) and not v.is_unchanged]:
                del was[name]
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
        return original(self._module).__name__

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

    def _pack(self, tensor: Tensor) -> "Packed | Kept":
        if id(tensor) in self._weights:
            return Kept.of(tensor)
        self._count += 1
        return self, self._count - 1

    def _recompute(self, h: Tensor) -> None:
        weights = list(self._module.parameters())
        if [id(weight) for weight in weights] != [id(kept.unchanged()) for kept in self._kept]:
            raise RuntimeError(
                f"the weights of {self._name} are not those of the forward pass, from which "
                "its output must be made again. Call backward before weights are exchanged; give "
                "torch.func.functional_call tensors that are no nn.Parameter."
            )
        saved: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._weights:
                saved.append(tensor.detach())
            # Not the tensor itself: a graph that keeps its own output is never freed.
            return tensor.detach()

        h = h.detach().requires_grad_(self._needs_grad)
        with (
            torch.enable_grad(),
            self._autocast(),
            saved_tensors_hooks(collect, lambda tensor: tensor),
            _as_it_was(self._attributes),
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


_Attributes = list[tuple[dict[str, Any], dict[str, Any]]]


def _attributes(module: nn.Module) -> _Attributes:
    """Of the module and what is in it, beside what they registered: where, and what is there.

    Of tensors no graph: an attribute that a hook sets to the last output would hold all before it.
    """
    return [
        (
            vars(part),
            {
                name: Kept.of(value.detach().requires_grad_(value.requires_grad))
                if isinstance(value, Tensor)
                else value
                for name, value in vars(part).items()
                if not name.startswith("_") and name != "training"
            },
        )
        for part in module.modules()
    ]


@contextmanager
def _as_it_was(attributes: _Attributes) -> Iterator[None]:
    """With these attributes, and afterwards with those of now."""
    now = [dict(place) for place, _ in attributes]
    try:
        for place, was in attributes:
            place |= {n: v.unchanged() if isinstance(v, Kept) else v for n, v in was.items()}
        yield
    finally:
        for (place, _), there in zip(attributes, now, strict=True):
            place.clear()
            place.update(there)


def _autocast(device: str) -> Callable[[], AbstractContextManager[object]]:
    """A context with autocast as it is now: backward runs outside of it."""
    if device == "meta":
        return nullcontext
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if enabled else None
    return functools.partial(torch.autocast, device, dtype, enabled)


def _unpack(packed: "Packed | Kept") -> Tensor:
    if isinstance(packed, Kept):
        return packed.unchanged()
    recomputation, number = packed
    return recomputation.saved(number)
