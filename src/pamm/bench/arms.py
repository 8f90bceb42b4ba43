"""The variants that every benchmark compares, as copies of one model that share its parameters."""

import copy

from torch import nn

from pamm.bench.paper import without_sharing
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.surgery import convert

ARMS = ("exact", "pamm", "paper", "subspace", "recompute", "sampled", "uniform_crs", "compact")
"""Exact training, PAMM as this library runs it, PAMM in the paper's operations, other methods.

``subspace:1/8`` is one with a ratio of its own; without, it has the method's (PAMM the given one).
"""
_WITHOUT_RATIO = ("exact", "paper", "recompute")


def make_arms(model: nn.Module, config: PammConfig, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """A copy of ``model`` for each name, with the very same Parameters."""
    if not names or not all(place(name) < len(ARMS) for name in names):
        raise PammError(f"arms are {', '.join(names) or 'none'}; choose from {', '.join(ARMS)}.")
    arms = {}
    for name in names:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        arm = copy.deepcopy(model, shared)
        if name in ("pamm", "paper"):
            convert(arm, config)
        elif name != "exact":
            method, _, ratio = name.partition(":")
            convert(arm, PammConfig(method, ratio or None, seed=config.seed))  # type: ignore[arg-type]
        if name == "paper":
            without_sharing(arm, config)
        arms[name] = arm
    return arms


def place(name: str) -> int:
    """Where an arm stands among ``ARMS``; behind them all if it is none."""
    kind, colon, ratio = name.partition(":")
    known = kind in ARMS and (not colon or (ratio and kind not in _WITHOUT_RATIO))
    return ARMS.index(kind) if known else len(ARMS)
