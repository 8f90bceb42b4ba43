"""Find the groups of a model, convert them in place, and take the conversion back.

Only instances are touched, never a class or a module of another library, and no attention forward
is replaced: the projections themselves change class. So every model whose attention calls
``q_proj``, ``k_proj`` and ``v_proj`` works, without a list of models.
"""

import fnmatch
from collections.abc import Callable, Iterable

from torch import nn

from pamm.compressors import compressor
from pamm.config import PammConfig
from pamm.errors import NothingToConvertError, PammError, PartialGroupError
from pamm.groups import TARGETS, candidates
from pamm.nn import Pamm, features, groups, is_linear, is_pamm
from pamm.report import ConvertedGroup, Report, SkippedGroup
from pamm.sharing import Group
from pamm.stream import Stream

Selector = str | Iterable[str] | Callable[[str], bool] | None


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

    Example:
        >>> attention = torch.nn.ModuleDict({n: torch.nn.Linear(8, 8) for n in ("q_proj", "k_proj", "v_proj")})
        >>> convert(attention, PammConfig(ratio="1/128")).converted[0].in_features
        8
    """
    config = config or PammConfig()
    found, skipped = [], []
    for name, layers in ((each.name, each.layers) for each in candidates(model, ("attention",))):
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
            Pamm.adopt(layer, group, member)
        widths = tuple(features(layer)[1] for layer in layers.values())
        converted.append(
            ConvertedGroup(name, features(first)[0], widths, first.weight.dtype, config)
        )
    return Report(config, tuple(converted), tuple(skipped))


def revert(model: nn.Module) -> int:
    """Make every converted layer a plain ``nn.Linear`` again; returns how many there were."""
    layers = [module for module in model.modules() if is_pamm(module)]
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


def _selected(name: str, include: Selector, exclude: Selector) -> bool:
    return (include is None or _matches(name, include)) and not (
        exclude is not None and _matches(name, exclude)
    )


def _matches(name: str, selector: Selector) -> bool:
    if callable(selector):
        return bool(selector(name))
    patterns = [selector] if isinstance(selector, str) else list(selector or ())
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _obstacle(layers: dict[str, nn.Module]) -> str | None:
    """Why these layers cannot be one group, or None."""
    for name, layer in layers.items():
        if is_pamm(layer):
            return "already converted"
        if not is_linear(layer):
            return f"{name} is {type(layer).__name__}, not nn.Linear"
        if type(layer.weight) is not nn.Parameter:
            return f"the weight of {name} is {type(layer.weight).__name__}, not a plain Parameter"
        if not layer.weight.is_floating_point():
            return f"the weight of {name} is {layer.weight.dtype}"
    sizes = {features(layer)[0] for layer in layers.values()}
    if len(sizes) > 1:
        return f"inputs of {' and '.join(map(str, sorted(sizes)))} features are not one tensor"
    if not any(layer.weight.requires_grad for layer in layers.values()):
        return "weights are frozen, so no input is kept for them anyway"
    return None


def _nothing(model: nn.Module, skipped: list[SkippedGroup]) -> str:
    looked_for = ", ".join("/".join(names) for names in TARGETS["attention"])
    if skipped:
        reasons = "; ".join(dict.fromkeys(f"{group.name}: {group.reason}" for group in skipped[:3]))
        more = f" (and {len(skipped) - 3} more)" if len(skipped) > 3 else ""
        return f"no group of {type(model).__name__} was converted. {reasons}{more}."
    return (
        f"{type(model).__name__} has no attention projections named {looked_for} as children of "
        "one module. Look at the names with print(model)."
    )
