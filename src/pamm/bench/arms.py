"""The variants that every benchmark compares, as copies of one model that share its parameters."""

import copy
import dataclasses
import re
from typing import Any

from torch import nn

from pamm.bench.paper import without_sharing
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.surgery import convert

ARMS = ("exact", "pamm", "paper", "subspace", "recompute", "sampled", "uniform_crs", "compact")
"""Exact training, PAMM as this library runs it, PAMM in the paper's operations, other methods.

``subspace:1/8`` is one with a ratio of its own; without, it has the method's (PAMM the given one).
``sampled:1/3:64`` has 64 directions, and ``sampled:1/3:64+mlp`` converts gate and up as well.
"""
_ARM = re.compile(r"(?P<method>\w+)(:(?P<ratio>[\d./]+))?(:(?P<directions>\d+))?(?P<mlp>\+mlp)?")
_ALLOWED = {
    "ratio": set(ARMS) - {"exact", "paper", "recompute"},
    "directions": {"sampled"},
    "mlp": set(ARMS) - {"exact", "pamm", "paper"},
}
"""For each part of a name, the methods that may have it."""


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
            own = dataclasses.replace(arm_config(name), seed=config.seed)
            for target in ("attention", "mlp") if _settings(name)["mlp"] else ("attention",):
                convert(arm, own, targets=target)
        if name == "paper":
            without_sharing(arm, config)
        arms[name] = arm
    return arms


def arm_config(name: str) -> PammConfig:
    """What an arm with settings of its own is converted with."""
    settings = _settings(name)
    directions = settings["directions"] and int(settings["directions"])
    return PammConfig(settings["method"], settings["ratio"], directions=directions)


def place(name: str) -> int:
    """Where an arm stands among ``ARMS``; behind them all if it is none."""
    settings = _settings(name)
    kind = settings["method"]
    known = kind in ARMS and all(
        kind in kinds for setting, kinds in _ALLOWED.items() if settings[setting]
    )
    return ARMS.index(kind) if known else len(ARMS)


def _settings(name: str) -> dict[str, Any]:
    """Parts of an arm's name, those left out as None."""
    match = _ARM.fullmatch(name)
    return match.groupdict() if match else dict.fromkeys(("method", *_ALLOWED))
