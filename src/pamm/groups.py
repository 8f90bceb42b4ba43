"""Which layers read one tensor: candidates by name."""

import dataclasses
from collections.abc import Iterable, Iterator

from torch import nn

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


def leaves(layer: nn.Module) -> dict[str, nn.Module]:
    """The linear layers in ``layer`` that keep its input, by name below it; itself is ``""``.

    A layer found by its name may be a wrapper: then it is what is inside that keeps the input.
    """
    return {"": layer}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Layers that by their names read one tensor."""

    name: str
    layers: dict[str, nn.Module]


def candidates(model: nn.Module, targets: Iterable[str]) -> Iterator[Candidate]:
    """Everything in ``model`` that is named like a group, convertible or not."""
    for prefix, module in model.named_modules():
        children = dict(module.named_children())
        dot = f"{prefix}." if prefix else ""
        for target in targets:
            for names in TARGETS[target]:
                if not all(name in children for name in names):
                    continue
                layers = {
                    f"{dot}{name}{below and '.'}{below}": leaf
                    for name in names
                    for below, leaf in leaves(children.pop(name)).items()
                }
                listed = f"{{{','.join(names)}}}" if len(names) > 1 else names[0]
                yield Candidate(f"{dot}{listed}", layers)
