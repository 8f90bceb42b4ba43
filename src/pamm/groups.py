"""Which layers read one tensor: candidates by their names, confirmed by a probe.

Names say where to look. What a probe saw decides: layers that received the very same tensor are a
group, whatever modules they are in, and everything else that keeps this tensor must be known,
because X is freed only when all who keep it let go of it.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from pamm.adapters import keeping, obstacle
from pamm.errors import PammError
from pamm.naming import bare, group_name
from pamm.nn import is_linear, is_pamm
from pamm.probe import Input

TARGETS = {
    "attention": (
        ("q_proj", "k_proj", "v_proj"),
        ("query", "key", "value"),
        ("q_lin", "k_lin", "v_lin"),
        ("q", "k", "v"),
        ("to_q", "to_k", "to_v"),
        ("linear_q", "linear_k", "linear_v"),
        ("query_proj", "key_proj", "value_proj"),
        ("project_q", "project_k", "project_v"),
        ("Wq", "Wk", "Wv"),
        ("wq", "wk", "wv"),
        ("q_head", "k_head", "v_head"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("q_proj", "kv_a_proj_with_mqa"),
        ("kv_a_proj_with_mqa",),
        ("q_proj", "kv_proj"),
        ("q_proj", "k_proj"),  # where v is k, or of another name
        ("k_proj", "v_proj"),  # where q is a learned vector
        ("q_proj",),  # where k and v are those of another layer
        ("qkv_proj",),
        ("query_key_value",),
        ("qkv",),
        ("Wqkv",),
        ("c_attn",),
        ("q_attn",),
        ("att_proj",),
        ("in_proj_qkvz", "in_proj_ba"),
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        ("in_proj",),
    ),
    "mlp": (
        ("gate_proj", "up_proj"),
        ("gate_up_proj",),
        ("w1", "w3"),
        ("wi_0", "wi_1"),
        ("wi",),
        ("fc1",),
        ("c_fc",),
        ("fc_in",),
        ("lin1",),
        ("dense_h_to_4h",),
        ("up_proj",),
    ),
}
"""Names that layers reading one input carry, as children of one module; the first set that is
there counts."""


def target_names(targets: str | Iterable[str]) -> list[str]:
    """One key of ``TARGETS``, or several, as a list; an error if it is none."""
    is_several = isinstance(targets, Iterable) and not isinstance(targets, str)
    names: list[Any] = list(targets) if is_several else [targets]
    if not names or any(name not in [*TARGETS] for name in names):
        raise PammError(f"targets is {targets!r}; choose from {', '.join(TARGETS)}.")
    return names


def leaves(layer: nn.Module) -> dict[str, nn.Module]:
    """The linear layers in ``layer`` that keep its input, by name below it; itself is ``""``.

    A layer found by its name may be a wrapper: then it is what is inside that keeps the input.
    """
    inner = dict(layer.named_children())
    return inner if list(inner) == ["linear"] else {"": layer}


@dataclasses.dataclass(frozen=True)
class Found:
    """Layers that read one tensor, as far as is known."""

    layers: dict[str, nn.Module]
    named: frozenset[str]
    """Those found by their names; the others only read the same tensor."""
    confirmed: bool = False
    """Whether a probe saw them read it."""
    reason: str | None = None
    """Why converting them would free nothing, if so."""
    source: str | None = None
    """The module that makes X and can make it again in backward."""
    no_source: str = "no forward pass saw what makes X; give an example that runs these"
    """Why there is none."""

    @property
    def name(self) -> str:
        """One name for all layers."""
        return group_name(map(bare, self.layers))


def candidates(model: nn.Module, targets: Iterable[str]) -> Iterator[dict[str, nn.Module]]:
    """Everything in ``model`` that is named like a group, convertible or not.

    A layer that several modules share has the name of the first.
    """
    name_of = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        children = dict(module.named_children())
        for names in (names for target in targets for names in TARGETS[target]):
            if all(name in children for name in names):
                named = {name_of[id(children[name])]: children.pop(name) for name in names}
                for layers in keeping(named):
                    found = [leaf for layer in layers.values() for leaf in leaves(layer).values()]
                    yield {name_of[id(leaf)]: leaf for leaf in found}


def find(
    model: nn.Module, targets: Iterable[str], inputs: list[Input] | None, widen: bool
) -> list[Found]:
    """The groups of ``model``.

    Args:
        model: the model to convert.
        targets: keys of ``TARGETS``.
        inputs: what a probe saw; without one names decide alone.
        widen: take in other linear layers that read the same tensor.
    """
    found: list[Found] = []
    taken: set[str] = set()
    seen: dict[str, nn.Module] = {}
    read = {name for each in inputs or () for name in each.readers}
    for layers in candidates(model, targets):
        layers = {name: layer for name, layer in layers.items() if name not in taken}
        is_seen = read & layers.keys() and all(is_linear(m) or is_pamm(m) for m in layers.values())
        if is_seen:  # those of them that ran; the others keep nothing
            seen |= {name: layer for name, layer in layers.items() if name in read}
        elif layers:
            taken |= layers.keys()
            found.append(Found(layers, frozenset(layers)))
    merged = [_examine(model, names, inputs or [], widen) for names in _merge(seen, inputs or [])]
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    found = [
        dataclasses.replace(group, reason=obstacle(model, group.layers) or group.reason)
        for group in (*found, *merged)
    ]
    return sorted(found, key=lambda group: min(order[name] for name in group.layers))


def _merge(seen: Iterable[str], inputs: list[Input]) -> list[list[str]]:
    """Layers that share an input, together."""
    group_of = {name: [name] for name in seen}
    for each in inputs:
        shared = [group_of[name] for name in each.readers if name in group_of]
        if len({id(group) for group in shared}) > 1:
            union = list(dict.fromkeys(name for group in shared for name in group))
            group_of.update(dict.fromkeys(union, union))
    return list({id(group): group for group in group_of.values()}.values())


def _examine(model: nn.Module, names: list[str], inputs: list[Input], widen: bool) -> Found:
    """What the probe says of layers that share an input."""
    members = dict.fromkeys(names)
    while True:
        read = [each for each in inputs if members.keys() & set(each.readers)]
        linear = {name for each in read for name in each.readers}
        others = {name for each in read for name in each.keepers if name not in members}
        if not (widen and others & linear):
            break
        members |= dict.fromkeys(sorted(others & linear))
    reason = None
    if all(each.is_parameter for each in read):
        reason = "their input lies in the memory of a parameter, so nothing is kept for it"
    elif others:
        listed = ", ".join(name or "the model" for name in sorted(others))
        reason = f"the same input is also kept by {listed}"
        reason += "; convert them all with widen=True" if others <= linear else ""
    source, no_source = _source(read)
    layers = {name: model.get_submodule(name) for name in members}
    return Found(layers, frozenset(names), True, reason, source, no_source)


def _source(read: list[Input]) -> tuple[str | None, str]:
    """The module that can make all these inputs again, or why there is none."""
    makers = {each.maker for each in read}
    obstacles = [each.obstacle for each in read if each.obstacle]
    if makers == {None}:
        return None, "X is no module's output"
    if len(makers) > 1:
        return None, "X is made in several ways"
    (maker,) = makers
    if obstacles:
        return None, f"{maker}, which makes X, {obstacles[0]}"
    return maker, ""
