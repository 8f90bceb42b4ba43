"""PEFT's LoRA: what keeps X is ``lora_A``, the first layer of an adapter.

The base layer is frozen and keeps no input; the ``lora_A`` beside it is trained and does. PEFT
casts X to the adapter's dtype (fp32 by default) once for each of q, k and v, and keeps all copies.
Converted, ``lora_A`` gets X before that cast and casts it itself: the output is PEFT's bit for
bit, no copy is kept, and q, k and v know by the identity of X that they share one cast and one
compression.

With dropout each ``lora_A`` reads a tensor of its own, which is compressed by itself. PEFT then
casts as before, because dropout rounds differently in another dtype.

PEFT's layers are told by their attributes: this file does not import PEFT.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pamm.functional import cast_weights_like_autocast
from pamm.nn import Pamm

VARIANTS = {"DoraLinearVariant"}
"""LoRA variants of PEFT that run ``lora_A`` as a layer on X; others work with its weight."""


class PammAdapter(Pamm):
    """Mixed into the class of a ``lora_A``: it takes X before PEFT's cast, and casts it itself."""

    def forward(self, input: Tensor) -> Tensor:
        """x A.T, as PEFT computes it."""
        weight, bias = cast_weights_like_autocast(self.weight, self.bias)
        is_plain = not (self.training and weight.requires_grad and torch.is_grad_enabled())
        if is_plain or _is_identity(input):
            return nn.functional.linear(input.to(weight.dtype), weight, bias)
        return self._from_state(input, weight.dtype, weight, bias)


def _is_identity(input: Tensor) -> bool:
    """Whether this is the identity matrix that DoRA sends through ``lora_A`` to see its product
    with ``lora_B``, of which no gradient is taken.
    """
    return input.ndim == 2 and input.shape[0] == input.shape[1] and not input.requires_grad


class Cast:
    """PEFT's switch ``cast_input_dtype_enabled`` of one layer.

    It is asked at each forward pass and is off while all adapters that would get X cast it
    themselves. So adapters that are added or chosen later work as in PEFT.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer: Any = layer
        self.before = getattr(layer, "cast_input_dtype_enabled", True)

    def __bool__(self) -> bool:
        layer = self.layer
        without = layer.training and all(
            isinstance(layer.lora_A[name], PammAdapter) and reads_x_itself(layer, name)
            for name in layer.active_adapters
            if name in layer.lora_A
        )
        return bool(self.before and not without)


def attach_adapters(model: nn.Module, names: Iterable[str]) -> None:
    """Let the layers ``names``, just converted, take X before PEFT's cast, if they are lora_A."""
    for name in names:
        owner, _ = _owner(model, name)
        if owner is not None and _switch(owner) is None:
            owner.cast_input_dtype_enabled = Cast(owner)


def detach_adapters(model: nn.Module) -> None:
    """Undo every ``attach_adapters`` in ``model``."""
    for module in model.modules():
        if (switch := _switch(module)) is not None:
            module.cast_input_dtype_enabled = switch.before  # type: ignore[assignment]


def _switch(layer: nn.Module) -> Cast | None:
    switch = vars(layer).get("cast_input_dtype_enabled")
    return switch if isinstance(switch, Cast) else None


def is_adapter(model: nn.Module, name: str) -> bool:
    """Whether the layer of this name is a ``lora_A``."""
    return _owner(model, name)[0] is not None


def keeping(siblings: dict[str, nn.Module]) -> Iterator[dict[str, nn.Module]]:
    """Of layers that read X, what keeps it: in groups that keep one tensor.

    Layers that PEFT did not touch are one group, as they are. Each adapter is a group: its
    ``lora_A`` of all siblings, or one alone where it reads a tensor of its own; copies that are
    trained in full (``modules_to_save``) belong to their adapter.
    """
    plain: dict[str, nn.Module] = {}
    groups: dict[object, dict[str, nn.Module]] = {}
    for name, layer in siblings.items():
        trained = getattr(layer, "modules_to_save", None)
        if is_adapted(layer):
            for adapter, lora_a in layer.lora_A.items():  # type: ignore[union-attr, operator]
                key = adapter if reads_x_itself(layer, adapter) else (adapter, name)
                groups.setdefault(key, {})[f"{name}.lora_A.{adapter}"] = lora_a
            plain[f"{name}.base_layer"] = layer.base_layer  # type: ignore[assignment]
        elif isinstance(trained, nn.ModuleDict):
            for adapter, copy in trained.items():
                groups.setdefault(adapter, {})[f"{name}.modules_to_save.{adapter}"] = copy
        else:
            plain[name] = layer
    if not groups or any(p.requires_grad for layer in plain.values() for p in layer.parameters()):
        yield plain
    yield from groups.values()


def is_adapted(layer: nn.Module) -> bool:
    """Whether this is a LoRA layer of PEFT around a base layer."""
    return isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) and hasattr(
        layer, "base_layer"
    )


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT put LoRA on any layer."""
    return any(is_adapted(module) for module in model.modules())


def reads_x_itself(layer: Any, adapter: str) -> bool:
    """Whether this adapter of a LoRA layer takes X, and not a tensor made of it.

    Of several adapters active at once, PEFT adds up the input gradients in the adapters' dtype. So
    that they stay the same, its cast stays as well.
    """
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    return (
        adapter not in _variants(layer)
        and isinstance(layer.lora_dropout[adapter], nn.Identity)
        and (len(active) == 1 or adapter not in active)
    )


def obstacle(model: nn.Module, names: Iterable[str]) -> str | None:
    """Why these layers of adapters cannot be converted, or None; also for other layers."""
    for name in names:
        owner, adapter = _owner(model, name)
        if owner is None:
            continue
        variant = type(_variants(owner).get(adapter)).__name__
        if adapter in _variants(owner) and variant not in VARIANTS:
            return f"{name} is of PEFT's {variant}, which does not run it as a layer on X"
        if hasattr(owner, "parameter_name"):
            return f"{name} is of PEFT's {type(owner).__name__}, which does not run it on X"
    return None


def dtypes(
    model: nn.Module, layers: dict[str, nn.Module]
) -> tuple[torch.dtype, tuple[torch.dtype, ...]]:
    """Of what layers of one group compress, and of each copy of X that they keep unconverted."""
    owned = [_owner(model, name) for name in layers]
    weights: list[Any] = [layer.weight for layer in layers.values()]
    own = [weight.dtype for weight in weights if weight.requires_grad]
    x = next((_input_dtype(*each) for each in owned if each[0] is not None), own[0])
    copies = [dtype for dtype in own if dtype != x] + [x] * (x in own)
    return min((x, *own), key=lambda dtype: dtype.itemsize), tuple(copies)


def uncast(model: nn.Module) -> dict[int, torch.dtype]:
    """Adapters' parameters by their id, with the dtype in which PEFT would have nothing to cast."""
    return {
        id(parameter): _input_dtype(layer, adapter)
        for layer in model.modules()
        if is_adapted(layer)
        for adapter in layer.lora_A  # type: ignore[union-attr]
        for part in (layer.lora_A, layer.lora_B)
        for parameter in part[adapter].parameters()  # type: ignore[index, union-attr, operator]
        if reads_x_itself(layer, adapter)
    }


def _input_dtype(layer: Any, adapter: str) -> torch.dtype:
    own = layer.lora_A[adapter].weight.dtype
    if not reads_x_itself(layer, adapter):
        return own
    base = layer.get_base_layer()
    if base.weight.is_floating_point():
        return base.weight.dtype
    return getattr(base, "compute_dtype", None) or own


def _variants(layer: Any) -> dict[str, object]:
    return getattr(layer, "lora_variant", {})


def _owner(model: nn.Module, name: str) -> tuple[Any, str]:
    """The LoRA layer that the layer ``name`` is the lora_A of, or None, and the adapter's name."""
    path, found, adapter = f".{name}".rpartition(".lora_A.")
    owner = model.get_submodule(path.removeprefix(".")) if found else None
    return (owner, adapter) if owner is not None and is_adapted(owner) else (None, "")
