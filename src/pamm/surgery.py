"""Find the groups of a model, convert them in place, and take the conversion back.

Only instances are touched, never a class or a module of another library, and no attention forward
is replaced: the projections themselves change class. So every model whose attention calls
``q_proj``, ``k_proj`` and ``v_proj`` works, without a list of models.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from pamm.bypass import refuse_bypasses
from pamm.compressors import compressor
from pamm.config import PammConfig
from pamm.errors import NothingToConvertError, PammError, PartialGroupError
from pamm.nn import PammLinear, groups
from pamm.report import ConvertedGroup, Report, SkippedGroup
from pamm.sharing import Group
from pamm.stream import Stream

Selector = str | Iterable[str] | Callable[[str], bool] | None

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("qkv_proj",),
    ("query_key_value",),
    ("qkv",),
    ("Wqkv",),
)
"""Names that layers reading one input carry, as children of one attention module."""


def convert(
    model: nn.Module,
    config: PammConfig | None = None,
    *,
    include: Selector = None,
    exclude: Selector = None,
) -> Report:
    """Convert q, k and v of every attention block, in place; training code stays as it is.

    A group is converted as a whole or not at all: X is freed only when every layer that reads it
    lets go of it.

    Args:
        model: any module. Its Parameters, state_dict keys, hooks and optimizers are not touched.
        config: how inputs are kept; the defaults of ``PammConfig`` if left out.
        include: convert only layers whose full name matches: a pattern (``"model.layers.*"``),
            several, or a function of the name. Everything by default.
        exclude: leave layers out, in the same ways.

    Returns:
        ``Report``: groups converted, groups skipped and why, bytes per group. Print it.

    Raises:
        NothingToConvertError: if no group was converted. Says what was looked for.
        PartialGroupError: if ``include`` and ``exclude`` cut through a group.
        PammError: if a framework computes q, k and v around the layers (``pamm.bypass``).

    Example:
        >>> attention = torch.nn.ModuleDict({n: torch.nn.Linear(8, 8) for n in SIBLINGS[0]})
        >>> convert(attention, PammConfig(ratio="1/128")).converted[0].in_features
        8
    """
    config = config or PammConfig()
    refuse_bypasses(model)
    found, skipped = [], []
    for name, layers in _find(model):
        chosen = [_selected(layer, include, exclude) for layer in layers]
        if any(chosen) and not all(chosen):
            left = ", ".join(layer for layer, take in zip(layers, chosen, strict=True) if not take)
            raise PartialGroupError(
                f"include and exclude select part of the group {name} and leave out {left}. That "
                "frees no memory, because the layers left out keep the same input. Select all "
                "layers of a group, or none."
            )
        if not any(chosen):
            skipped.append(SkippedGroup(name, "not selected by include and exclude"))
        elif reason := _obstacle(layers):
            skipped.append(SkippedGroup(name, reason))
        else:
            found.append((name, layers))
    if not found:
        raise NothingToConvertError(_nothing(model, skipped))

    converted = []
    for name, layers in found:
        first = next(iter(layers.values()))
        stream = Stream(config.seed, name, config.backend, first.weight.device)
        group = Group(name, list(layers.values()), compressor(config), stream)
        for member, layer in enumerate(layers.values()):
            PammLinear.adopt(layer, group, member)
        widths = tuple(layer.out_features for layer in layers.values())
        converted.append(
            ConvertedGroup(name, first.in_features, widths, first.weight.dtype, config)
        )
    return Report(config, tuple(converted), tuple(skipped))


def revert(model: nn.Module) -> int:
    """Make every converted layer a plain ``nn.Linear`` again; returns how many there were."""
    layers = [module for module in model.modules() if isinstance(module, PammLinear)]
    for layer in layers:
        layer.release()
    return len(layers)


def seek(model: nn.Module, step: int) -> None:
    """Position the draws of every group at the beginning of training step ``step``.

    Call it before each step and a resumed run draws what the uninterrupted one would have drawn
    (``pamm.integrations.transformers.PammCallback`` does). Without it draws follow one another
    from the conversion on.

    Raises:
        PammError: if the model is not converted or the step is negative.
    """
    if step < 0:
        raise PammError(f"step is {step}; give the number of the training step, 0 or above.")
    found = groups(model)
    if not found:
        raise PammError("this model has no PAMM layers; call pamm.convert(model) first.")
    for group in found:
        group.stream.seek(step)


def _find(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Linear]]]:
    """Name and layers of everything named like a group, convertible or not."""
    for prefix, module in model.named_modules():
        children = dict(module.named_children())
        for names in SIBLINGS:
            if all(name in children for name in names):
                dot = f"{prefix}." if prefix else ""
                layers = {f"{dot}{name}": children[name] for name in names}
                group = f"{{{','.join(names)}}}" if len(names) > 1 else names[0]
                yield f"{dot}{group}", layers  # type: ignore[misc]


def _selected(name: str, include: Selector, exclude: Selector) -> bool:
    return (include is None or _matches(name, include)) and not (
        exclude is not None and _matches(name, exclude)
    )


def _matches(name: str, selector: Selector) -> bool:
    if callable(selector):
        return bool(selector(name))
    patterns = [selector] if isinstance(selector, str) else list(selector or ())
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _obstacle(layers: dict[str, nn.Linear]) -> str | None:
    """Why these layers cannot be one group, or None."""
    for name, layer in layers.items():
        if isinstance(layer, PammLinear):
            return "already converted"
        if type(layer) is not nn.Linear:
            return f"{name} is {type(layer).__name__}, not nn.Linear"
        if type(layer.weight) is not nn.Parameter:
            return f"the weight of {name} is {type(layer.weight).__name__}, not a plain Parameter"
        if not layer.weight.is_floating_point():
            return f"the weight of {name} is {layer.weight.dtype}"
    sizes = {layer.in_features for layer in layers.values()}
    if len(sizes) > 1:
        return f"inputs of {' and '.join(map(str, sorted(sizes)))} features are not one tensor"
    if not any(layer.weight.requires_grad for layer in layers.values()):
        return "weights are frozen, so no input is kept for them anyway"
    return None


def _nothing(model: nn.Module, skipped: list[SkippedGroup]) -> str:
    looked_for = ", ".join("/".join(names) for names in SIBLINGS)
    if skipped:
        reasons = "; ".join(dict.fromkeys(f"{group.name}: {group.reason}" for group in skipped[:3]))
        more = f" (and {len(skipped) - 3} more)" if len(skipped) > 3 else ""
        return f"no group of {type(model).__name__} was converted. {reasons}{more}."
    return (
        f"{type(model).__name__} has no attention projections named {looked_for} as children of "
        "one module. Look at the names with print(model)."
    )
