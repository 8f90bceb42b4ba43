"""The paper's studies as cells of a grid: names, and what each changes in the base run."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from pamm.compressors import compressor
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.recipes.pretraining.settings import PretrainConfig

Cells = dict[str, dict[str, Any]]
"""By name: keys of an arm, and under ``run`` keys of the run that differ from the base."""

RATIOS = ("1/128", "1/256", "1/512")
SHAPES = ((128, 256), (128, 1024), (256, 256), (256, 512), (512, 128), (512, 256), (512, 512))
TOLERANCES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, None)


def ratio(base: PretrainConfig) -> Cells:
    """Exact against PAMM at three ratios (the paper's table of pre-training), with one control:
    exact at the reduced rate of q, k and v."""
    return {
        **_exact(base),
        **{f"pamm {text}": {"method": "pamm", "ratio": text} for text in RATIOS},
    }


def shape(base: PretrainConfig) -> Cells:
    """Batch size and sequence length, exact against PAMM 1/512: the paper's seven rows.

    A forward pass has as many tokens as the base's, if the batch has.
    """
    made: Cells = {}
    for batch, length in SHAPES:
        size = max(1, min(batch, base.tokens_per_pass // length))
        run = {"sequence_length": length, "batch_size": size, "global_batch": batch}
        made[f"exact {batch} x {length}"] = {"method": "exact", "run": run}
        made[f"pamm {batch} x {length}"] = {"method": "pamm", "ratio": "1/512", "run": run}
    return made


def tolerance(base: PretrainConfig) -> Cells:
    """Epsilon from 0 to infinity at each ratio: the paper's figure."""
    return {
        f"pamm {text}, tolerance {'inf' if value is None else value}": {
            "method": "pamm",
            "ratio": text,
            "tolerance": value,
        }
        for text in RATIOS
        for value in TOLERANCES
    }


def method(base: PretrainConfig) -> Cells:
    """Other ways to hold the bytes that PAMM holds at each ratio, and what this library advises.

    They get the least ratio with which they hold no less than PAMM does. Where the run lowers the
    rate of q, k and v, PAMM and they are trained at the full rate, too: the better one counts. What
    the library advises has the full rate, with which it is meant to be used.
    """
    made = _exact(base)
    for text in RATIOS:
        config = PammConfig("pamm", text)  # type: ignore[arg-type]
        equal: Cells = {f"pamm {text}": {"method": "pamm", "ratio": text}}
        for name in ("uniform_crs", "compact"):
            share = ratio_for_bytes(name, held(config, base), base)
            equal[f"{name}, bytes of pamm {text}"] = {"method": name, "ratio": share}
        made |= equal
        if base.lr_factor != 1:
            for name, cell in equal.items():
                made[f"{name}, full rate"] = cell | {"lr_factor": 1.0}
    for text in ("1/8", "3/8"):
        made[f"subspace {text}"] = {"method": "subspace", "ratio": text, "lr_factor": 1.0}
    made["default"] = {"lr_factor": 1.0}
    return made


STUDIES: dict[str, Callable[[PretrainConfig], Cells]] = {
    "ratio": ratio,
    "shape": shape,
    "tolerance": tolerance,
    "method": method,
}


def cells(names: object, base: PretrainConfig) -> Cells:
    """The cells of one or several of the paper's studies; the same cell of two counts once.

    Raises:
        PammError: if there is no study of a name.
    """
    chosen = [names] if isinstance(names, str) else names
    if not isinstance(chosen, list) or any(name not in STUDIES for name in chosen):
        raise PammError(
            f"cells is {names!r}; choose from {', '.join(STUDIES)}, one or a list, or write a "
            "mapping of cells."
        )
    return {key: cell for name in chosen for key, cell in STUDIES[name](base).items()}


def held(config: PammConfig, base: PretrainConfig) -> int:
    """Bytes of one group's state, in one forward pass, in bf16."""
    return compressor(config).state_bytes(base.tokens_per_pass, _width(base), torch.bfloat16)


def ratio_for_bytes(name: str, budget: int, base: PretrainConfig) -> str:
    """The least ratio, as a fraction, with which a method holds ``budget`` bytes or more.

    Raises:
        PammError: if it never does.
    """
    # CompAct keeps whole features, the others whole rows.
    whole = _width(base) if name == "compact" else base.tokens_per_pass

    def enough(count: int) -> bool:
        return held(PammConfig(name, Fraction(count, whole)), base) >= budget  # type: ignore[arg-type]

    low, high = 1, whole
    if not enough(high):
        raise PammError(f"{name} holds less than {budget} bytes at any ratio.")
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return str(Fraction(low, whole))


def _exact(base: PretrainConfig) -> Cells:
    """Exact training; and, where PAMM's weights have another rate, exact training with that."""
    made: Cells = {"exact": {"method": "exact"}}
    if base.lr_factor != 1:
        made[f"exact, q/k/v rate x {base.lr_factor:g}"] = {
            "method": "exact",
            "lr_factor": base.lr_factor,
        }
    return made


def _width(base: PretrainConfig) -> int:
    assert isinstance(base.model, dict)
    return base.model["hidden_size"]
