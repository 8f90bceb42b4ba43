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
``sampled:1/3:64`` has 64 directions, ``sampled:1/3:16bit`` rounds nothing to 8 bits.
``recompute+sampled:1/4:64`` has the one for q, k and v, the other for gate and up.
"""
_ARM = re.compile(
    r"(?P<method>\w+)(:(?P<ratio>[\d./]+))?(:(?P<directions>\d+))?(:(?P<wide>16bit))?"
)
_ALLOWED = {
    "ratio": set(ARMS) - {"exact", "paper", "recompute"},
    "directions": {"sampled"},
    "wide": {"sampled"},
}
"""For each part of a name, the methods that may have it."""
_BARE = ("pamm", "paper")
"""Those that are PAMM with the ratio of all arms."""


def make_arms(model: nn.Module, config: PammConfig, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """A copy of ``model`` for each name, with the very same Parameters."""
    if not names or not all(place(name) < len(ARMS) for name in names):
        raise PammError(f"arms are {', '.join(names) or 'none'}; choose from {', '.join(ARMS)}.")
    arms = {}
    for name in names:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        arm = copy.deepcopy(model, shared)
        for part, target in zip(name.split("+"), ("attention", "mlp"), strict=False):
            if part != "exact":
                own = config if part in _BARE else arm_config(part)
                convert(arm, dataclasses.replace(own, seed=config.seed), targets=target)
        if name == "paper":
            without_sharing(arm, config)
        arms[name] = arm
    return arms


def arm_config(name: str) -> PammConfig:
    """What the layers of a setting (``sampled:1/3:64``) are converted with."""
    settings = _settings(name)
    directions = settings["directions"] and int(settings["directions"])
    fp8 = False if settings["wide"] else None
    return PammConfig(settings["method"], settings["ratio"], directions=directions, fp8=fp8)


def place(name: str) -> int:
    """Where an arm stands among ``ARMS``; behind them all if it is none."""
    first, *more = name.split("+")
    known = len(more) <= 1 and all(_is_setting(part) for part in (first, *more))
    if not known or ("paper" in name and more):
        return len(ARMS)
    return ARMS.index(_settings(first)["method"])


def inputs(name: str) -> int:
    """How many inputs X of a block an arm converts; for exact training, those of q, k and v."""
    return max(1, sum(part != "exact" for part in name.split("+")))


def _is_setting(name: str) -> bool:
    settings = _settings(name)
    kind = settings["method"]
    return kind in ARMS and all(
        kind in kinds for setting, kinds in _ALLOWED.items() if settings[setting]
    )


def _settings(name: str) -> dict[str, Any]:
    """Parts of an arm's name, those left out as None."""
    match = _ARM.fullmatch(name)
    return match.groupdict() if match else dict.fromkeys(("method", *_ALLOWED))
