"""Linear layers whose weight gradient comes from a compressed input."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pamm.compressors import Compressor
from pamm.errors import PammError
from pamm.functional import autocast_dtype, cast_weights_like_autocast, linear_from_state
from pamm.sharing import Group
from pamm.swap import Swapped, mixed, restore


def is_conv1d(layer: nn.Module) -> bool:
    """Whether this is GPT-2's ``Conv1D`` from Transformers: a linear layer, its weight (in, out).

    Told by its name and its shapes, because this file does not import Transformers.
    """
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    return (
        type(layer).__name__ == "Conv1D"
        and isinstance(weight, Tensor)
        and isinstance(bias, Tensor)
        and weight.ndim == 2
        and bias.shape == weight.shape[1:]
    )


def is_linear(layer: nn.Module) -> bool:
    """Whether ``layer`` is of a class that can be converted: y = x W.T + bias and nothing else.

    Subclasses are not: they may have a forward of their own.
    """
    return type(layer) is nn.Linear or is_conv1d(layer)


def features(layer: nn.Module) -> tuple[int, int]:
    """In and out features of a layer, converted or not."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)


class Pamm(Swapped):
    """Mixed into a linear layer's class: it keeps a compressed input for its weight gradient.

    y = x W.T + bias, dx and dbias are those of the layer bit for bit; dW is approximate. Made by
    ``pamm.convert``, which swaps the class of an existing layer: Parameters, hooks, device,
    state_dict keys and optimizers already built stay as they are.

    With the layer in eval mode, its weight frozen or gradients off, it is the plain layer.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    pamm_group: Group
    pamm_member: int
    pamm_watcher: Compressor | None = None
    """Computes the weight gradient in place of the group's method (``pamm.fidelity.watch``)."""

    @classmethod
    def adopt(cls, layer: nn.Module, group: Group, member: int) -> None:
        """Turn ``layer`` into a converted layer in place, as number ``member`` of ``group``."""
        if not is_pamm(layer):
            is_common = cls is Pamm and type(layer) is nn.Linear
            layer.__class__ = PammLinear if is_common else mixed(cls, type(layer))
        layer.pamm_group, layer.pamm_member = group, member  # type: ignore[assignment]

    def release(self) -> None:
        """Turn this layer back into what it was, in place."""
        del self.pamm_group, self.pamm_member
        restore(self)

    def forward(self, input: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """x W.T + bias."""
        if not (self.training and self.weight.requires_grad and torch.is_grad_enabled()):
            warn_if_frozen(self, self.pamm_group.layers)
            return super().forward(input)  # type: ignore[misc]
        weight = self.weight if isinstance(self, nn.Linear) else self.weight.T
        weight, bias = cast_weights_like_autocast(weight, self.bias)
        return self._from_state(input, autocast_dtype(input), weight, bias)

    def _from_state(
        self, input: Tensor, dtype: torch.dtype, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The layer in ``dtype``, with what the group shares."""
        group = self.pamm_group
        cast, state = group.share(self.pamm_member, input, dtype)
        method = self.pamm_watcher or group.method
        kept = input if input.dtype.itemsize < cast.dtype.itemsize else cast
        if method.needs_x:  # not in the state from the start, which a group shares and would keep
            kept = kept.detach().reshape(-1, kept.shape[-1])
            state = (*state, kept)
        with self._saving(input, kept):
            return linear_from_state(input, cast, weight, bias, method, state)

    def _saving(self, input: Tensor, kept: Tensor) -> AbstractContextManager[object]:
        """What autograd does with what it saves: for layers whose input is made again."""
        return nullcontext()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """``.to(device)`` takes the group along: a compiled layer would notice it move later."""
        super()._apply(fn, recurse)
        self.pamm_group.move(self.weight.device)
        return self

    def extra_repr(self) -> str:
        """Shapes, and which group it is in: printing the model shows what was converted."""
        return ", ".join(filter(None, (super().extra_repr(), f"group={self.pamm_group.name}")))

    __repr__ = nn.Module.__repr__


class PammLinear(Pamm, nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """An ``nn.Linear`` that keeps a compressed input for its weight gradient (see ``Pamm``)."""

    def __init__(self, *_: object, **__: object) -> None:
        raise PammError(
            "a PammLinear is made of an nn.Linear that is there: make that, and call "
            "pamm.convert(model)."
        )

    __reduce_ex__ = object.__reduce_ex__  # type: ignore[assignment]  # this class can be imported


def is_pamm(layer: nn.Module) -> TypeGuard[Pamm]:
    """Whether ``layer`` is converted."""
    return isinstance(layer, Pamm)


def is_trained(layers: Iterable[nn.Module]) -> bool:
    """Whether the weight of any of these is."""
    return any(layer.weight.requires_grad for layer in layers)  # type: ignore[union-attr]


_told: WeakSet[nn.Module] = WeakSet()
"""Layers of groups that a warning was given for."""


def warn_if_frozen(layer: nn.Module, group: Iterable[nn.Module]) -> None:
    """Say once that all layers of a group were frozen since it was converted."""
    if torch.compiler.is_compiling() or not (layer.training and torch.is_grad_enabled()):
        return
    if layer not in _told and not is_trained(group):
        _told.update(group)
        warnings.warn(
            "all weights of a converted group are frozen, so that there is nothing to free. If "
            "PEFT's adapters are trained in their place, it is they that must be converted: call "
            "pamm.convert(model) after get_peft_model.",
            stacklevel=2,  # of little use: the user's line lies any number of modules above
        )


def groups(model: nn.Module) -> list[Group]:
    """The groups of a converted model, each once, in the order of its modules.

    Of each its ``name``, its ``layers``, the ``stream`` that draws for it and its ``method``, which
    compresses.
    """
    found = {id(m.pamm_group): m.pamm_group for m in model.modules() if is_pamm(m)}
    return list(found.values())


def check_model(model: object) -> None:
    """Refuse what is no module: a name, a class, parameters."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise PammError(f"model is {kind}; give the model itself, a torch.nn.Module.")


def refuse_same_names(found: list[Group]) -> None:
    """Refuse to tell groups apart by names that do not.

    Raises:
        PammError: if two groups have one name.
    """
    counts = Counter(group.name for group in found)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise PammError(
            f"{counts[twice[0]]} groups are named {twice[0]}, because parts of this model were "
            "converted apart, or copied; they would draw alike as well. Convert the whole model, "
            "with include for its parts."
        )
