"""Find the groups of a model, convert them in place, and take the conversion back.

Only instances are touched, never a class or a module of another library, and no attention forward
is replaced: the projections themselves change class. So every model whose attention calls
``q_proj``, ``k_proj`` and ``v_proj`` works, without a list of models.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pamm.adapters import (
    PammAdapter,
    attach_adapters,
    detach_adapters,
    dtypes,
    has_adapters,
    is_adapter,
)
from pamm.bypass import fused, refuse_bypasses
from pamm.compressors import compressor
from pamm.config import PammConfig, checked
from pamm.errors import NothingToConvertError, PammError, PartialGroupError
from pamm.example import Example
from pamm.groups import TARGETS, Found, find, target_names
from pamm.naming import Selector, selected, selector
from pamm.nn import (
    Pamm,
    check_model,
    features,
    is_linear,
    is_pamm,
    is_trained,
)
from pamm.probe import Input, probe
from pamm.recompute import Recomputing, attach, detach, left_unread
from pamm.report import ConvertedGroup, Report, SkippedGroup, merge_skipped
from pamm.sharing import Group
from pamm.stream import Stream
from pamm.swap import refuse_covered

_NOT_AGAIN = "cannot be made again in backward"


def convert(
    model: nn.Module,
    config: PammConfig | None = None,
    *,
    include: Selector = None,
    exclude: Selector = None,
    targets: str | Iterable[str] = "attention",
    widen: bool = False,
    example: Example | None = None,
) -> Report:
    """Convert q, k and v of every attention block, in place; training code stays as it is.

    A group is converted as a whole or not at all: X is freed only when everything that keeps it
    lets go of it. Groups are found by names and confirmed by one forward pass of a copy without
    weights (``pamm.probe``). Call it again for other layers with other settings: a vision tower, or
    gate and up of the MLP.

    Args:
        model: any module. Its Parameters, state_dict keys, hooks and optimizers are not touched.
        config: how inputs are kept; the defaults of ``PammConfig`` if left out.
        include: convert only layers whose full name matches: a pattern (``"model.layers.*"``),
            several, or a function of the name. Everything by default.
        exclude: leave layers out, in the same ways.
        targets: ``"attention"`` (q, k, v), ``"mlp"`` (gate and up, or the first layer), or both.
        widen: where other linear layers read the same X (the MLP of a parallel block, a gate),
            convert those too. Without it such a group is skipped, with the reason.
        example: arguments of the model's forward for the probe: one tensor, a tuple, or a mapping.
            Models of Transformers need none. Without one other models are converted by names.

    Returns:
        ``Report``: groups converted, groups skipped and why, bytes per group. Print it.

    Raises:
        NothingToConvertError: if no group was converted. Says what was looked for.
        PartialGroupError: if ``include`` and ``exclude`` cut through a group.
        PammError: if an argument is of another kind, ``targets`` has an unknown name, or a
            framework computes q, k and v around the layers (``pamm.bypass``).

    Examples:
        >>> attention = torch.nn.ModuleDict({"query": torch.nn.Linear(8, 8)})
        >>> attention.update({"key": torch.nn.Linear(8, 8), "value": torch.nn.Linear(8, 8)})
        >>> convert(attention, PammConfig("pamm", "1/128")).converted[0].in_features
        8
    """
    check_model(model)
    config, targets = _config(config), target_names(targets)
    include, exclude = selector("include", include), selector("exclude", exclude)
    if not isinstance(example, Tensor | Sequence | Mapping | None) or isinstance(example, str):
        raise PammError(
            f"example is {type(example).__name__}; give arguments of the model's forward: one "
            "tensor, a tuple, or a mapping."
        )
    refuse_bypasses(model)
    found, report = _survey(model, config, include, exclude, targets, widen, example)
    refuse_nothing(model, targets, report)
    _revert_wrapped(model)
    with torch.inference_mode(mode=False):  # what is made here, training writes to
        for group in found:
            _convert(model, group, config)
    return report


def survey(
    model: nn.Module,
    config: PammConfig | None = None,
    *,
    targets: str | Iterable[str] = "attention",
    widen: bool = False,
) -> Report:
    """What ``convert`` would do; the model stays as it is, and finding no group is no error.

    Examples:
        >>> model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("query", "key", "value")})
        >>> [group.layers for group in survey(model, PammConfig("pamm")).converted]
        [('query', 'key', 'value')]
    """
    config, targets = _config(config), target_names(targets)
    return _survey(model, config, None, None, targets, widen, None)[1]


def refuse_nothing(model: nn.Module, targets: str | Iterable[str], report: Report) -> None:
    """Raise unless a group is converted; says what was looked for."""
    if not report.converted:
        raise NothingToConvertError(_nothing(model, target_names(targets), report))


def _survey(
    model: nn.Module,
    config: PammConfig,
    include: Selector,
    exclude: Selector,
    targets: list[str],
    widen: bool,
    example: Example | None,
) -> tuple[list[Found], Report]:
    """The groups to convert, and what the report will say."""
    inputs, problem = _probe(model, example)
    found: list[Found] = []
    skipped = []
    for group in find(model, targets, inputs, widen):
        if problem:  # which the error says once, for all groups
            group = dataclasses.replace(group, no_source="no forward pass tells what makes X")
        reason = _reason(group, config, include, exclude) or fused(model, group.layers)
        if config.recomputes and group.source is not None and not reason:
            reason = _own_forward(group.source, model.get_submodule(group.source))
        if reason:
            skipped.append(SkippedGroup(group.name, tuple(group.layers), reason))
        else:
            found.append(group)
    converted = tuple(_described(model, group, config) for group in found)
    return found, Report(config, converted, tuple(skipped), problem)


def _config(config: PammConfig | None) -> PammConfig:
    return PammConfig() if config is None else checked(config)


def _probe(model: nn.Module, example: Example | None) -> tuple[list[Input] | None, str | None]:
    """What a probe saw, or why there is none: whatever goes wrong in it is no one's error here."""
    try:
        return probe(model, example), None
    except Exception as error:
        text = " ".join(str(error).split())
        if not isinstance(error, PammError):
            text = f"{type(error).__name__}: {text}"
            if example is None:
                text += " (give convert an example of the arguments if those were missing)"
        return None, text


def _described(model: nn.Module, found: Found, config: PammConfig) -> ConvertedGroup:
    sizes = [features(layer) for layer in found.layers.values()]
    return ConvertedGroup(
        found.name,
        tuple(found.layers),
        sizes[0][0],
        tuple(out for _, out in sizes),
        *dtypes(model, found.layers),
        config,
        found.confirmed,
        found.source,
    )


def _convert(model: nn.Module, found: Found, config: PammConfig) -> None:
    layers = list(found.layers.values())
    weight = layers[0].weight
    adapters = {name for name in found.layers if is_adapter(model, name)}
    # PEFT casts X for an adapter, and that copy is not what can be made again: it casts X itself.
    if config.method != "recompute" or adapters:
        stream = Stream(config.seed, found.name, config.backend, weight.device)  # type: ignore[arg-type]
        method = compressor(config)
        method.prepare(features(layers[0])[0], weight.device)  # type: ignore[arg-type]
        group = Group(found.name, layers, method, stream)
        for member, (name, layer) in enumerate(found.layers.items()):
            (PammAdapter if name in adapters else Pamm).adopt(layer, group, member)
        attach_adapters(model, found.layers)
    if config.recomputes:
        assert found.source is not None
        attach(model.get_submodule(found.source), layers, found.name)


def revert(model: nn.Module) -> int:
    """Give every converted layer its own class again; returns how many there were.

    Raises:
        PammError: if a layer was parametrized since (``weight_norm``); nothing is changed then.
    """
    check_model(model)
    refuse_covered(model.named_modules())
    layers = _converted(model).values()
    detach(model)  # first: what it mixed in came last
    for layer in layers:
        if is_pamm(layer):
            layer.release()
    detach_adapters(model)
    return len(layers)


def _revert_wrapped(model: nn.Module) -> None:
    """Revert groups that PEFT wrapped, a layer or all, and froze since: adapters are trained in
    their place. Other groups stay as they are, frozen ones too (a vision tower)."""
    converted = _converted(model)
    frozen: set[nn.Module] = set()
    for name, layer in converted.items():
        members = layer.pamm_group.layers if isinstance(layer, Pamm) else layer.pamm_readers
        if name.endswith(".base_layer") and not is_trained(members):
            frozen |= set(members)
    named = {name: layer for name, layer in converted.items() if layer in frozen}
    taken = named | left_unread(model, named.values())
    refuse_covered(taken.items())  # before anything is changed
    for module in taken.values():
        revert(module)


def is_converted(model: nn.Module) -> bool:
    """Whether any layer of ``model`` is converted; beside adapters frozen others do not count."""
    adapted = has_adapters(model)
    return any(
        not adapted or layer.weight.requires_grad or is_adapter(model, name)
        for name, layer in _converted(model).items()
    )


def _converted(model: nn.Module) -> dict[str, Pamm | Recomputing]:
    named = model.named_modules()
    return {name: layer for name, layer in named if isinstance(layer, Pamm | Recomputing)}


def _reason(group: Found, config: PammConfig, include: Selector, exclude: Selector) -> str | None:
    """Why ``group`` is not converted, or None.

    Raises:
        PartialGroupError: if some, but not all, layers of one module are selected.
    """
    chosen = {name: selected(name, include, exclude) for name in group.named}
    if not any(chosen.values()):
        return "not selected by include and exclude"
    if not all(chosen.values()):
        left = [name for name in group.layers if not chosen.get(name, True)]
        cut = {name.rpartition(".")[0] for name in left}
        if cut & {name.rpartition(".")[0] for name, take in chosen.items() if take}:
            raise PartialGroupError(
                f"include and exclude select part of the group {group.name} and leave out "
                f"{', '.join(left)}. That frees no memory, because the layers left out keep the "
                "same input. Select all layers of a group, or none."
            )
        return f"selected in part, and {', '.join(left)} keep the same input"
    if widened := [n for n in group.layers if not selected(n, None, exclude)]:
        return f"the same input is kept by {', '.join(widened)}, which is excluded"
    if reason := _obstacle(group.layers) or group.reason:
        return reason
    if config.recomputes and group.source is None:
        return f"{group.no_source}: it {_NOT_AGAIN}"
    return None


def _own_forward(name: str, module: nn.Module) -> str | None:
    if "forward" not in vars(module):
        return None
    return (
        f"{name} was given a forward of its own, which a conversion cannot reach (hooks of "
        "Accelerate do that where a model lies on several devices)"
    )


def _obstacle(layers: dict[str, nn.Module]) -> str | None:
    """Why these layers cannot be one group, or None."""
    for name, layer in layers.items():
        if isinstance(layer, Pamm | Recomputing):
            return "already converted"
        if not is_linear(layer):
            kind = type(layer)
            whose = f"{kind.__module__}." if kind.__name__ == "Linear" else ""
            return f"{name} is {whose}{kind.__name__}, not nn.Linear"
        if reason := _own_forward(name, layer):
            return reason
        if type(layer.weight) is not nn.Parameter:
            return f"the weight of {name} is {type(layer.weight).__name__}, not a plain Parameter"
        if not layer.weight.is_floating_point():
            return f"the weight of {name} is {layer.weight.dtype}"
    sizes = {features(layer)[0] for layer in layers.values()}
    if len(sizes) > 1:
        return f"inputs of {' and '.join(map(str, sorted(sizes)))} features are not one tensor"
    if not is_trained(layers.values()):
        return "weights are frozen, so no input is kept for them anyway"
    return None


def _nothing(model: nn.Module, targets: list[str], report: Report) -> str:
    kind = type(model).__name__
    if report.skipped:
        lines = [f"{name}: {reason}" for name, reason in merge_skipped(report.skipped)]
        more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
        text = f"no group of {kind} was converted. {'; '.join(lines[:3])}{more}."
        if report.config.recomputes and report.problem:
            text += f" No forward pass could run: {report.problem}."
        if any(line.endswith(_NOT_AGAIN) for line in lines):
            text += (
                " Methods 'subspace' and 'pamm' keep something of X instead: "
                'pamm.convert(model, pamm.PammConfig("subspace")).'
            )
        return text
    looked_for = ", ".join("/".join(names) for target in targets for names in TARGETS[target])
    return (
        f"{kind} has no {' or '.join(targets)} projections named {looked_for} as children of one "
        "module. Look at the names with print(model)."
    )
