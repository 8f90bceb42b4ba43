"""The variants that every benchmark compares, as copies of one model that share its parameters."""

import copy

from torch import nn

from pamm.bench.paper import without_sharing
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.surgery import convert

ARMS = ("exact", "pamm", "paper")
"""Exact training, PAMM as this library runs it, PAMM in the paper's operations."""


def make_arms(model: nn.Module, config: PammConfig, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """A copy of ``model`` for each name, with the very same Parameters."""
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise PammError(f"arms are {', '.join(names) or 'none'}; choose from {', '.join(ARMS)}.")
    arms = {}
    for name in names:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        arm = copy.deepcopy(model, shared)
        if name != "exact":
            convert(arm, config)
        if name == "paper":
            without_sharing(arm, config)
        arms[name] = arm
    return arms
