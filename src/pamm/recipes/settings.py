"""What the settings of all recipes share: arms, files that come with the package, checks."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

from pamm.config import PammConfig, check_keys
from pamm.errors import PammError
from pamm.groups import TARGETS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Of a folder, or of a file without its suffix."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the trainings that a run compares.

    Args:
        name: any text; ``folder`` is the name that file systems accept.
        config: how inputs are kept. With method ``"exact"`` the model is not converted at all.
        lr: peak learning rate of this arm; ``None`` takes the run's.
        lr_factor: on it for the chosen layers in this arm: those with an approximate gradient, or
            all with method ``"exact"``; ``None`` takes the run's, or 1 if no gradient is
            approximate.
        targets: ``"attention"`` (q, k, v) or ``"mlp"`` (gate and up), as in ``pamm.convert``.
    """

    name: str
    config: PammConfig
    lr: float | None = None
    lr_factor: float | None = None
    targets: str = "attention"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.folder):
            raise PammError(
                f"an arm is named {self.name!r}; give text that begins with a letter or a digit."
            )
        if not isinstance(self.targets, str) or self.targets not in TARGETS:
            raise PammError(
                f"targets of arm {self.name!r} is {self.targets!r}; choose {' or '.join(TARGETS)}."
            )
        for key in ("lr", "lr_factor"):
            if getattr(self, key) is not None:
                object.__setattr__(
                    self, key, positive(f"{key} of arm {self.name!r}", getattr(self, key))
                )
        if self.lr_factor not in (None, 1) and not (self.approximates or self.is_exact):
            raise PammError(
                f"lr_factor of arm {self.name!r} is {self.lr_factor:g}, but with method "
                "'recompute' no gradient is approximate. Leave it out; method 'exact' may have one."
            )

    @property
    def folder(self) -> str:
        """Name of the arm's folder: ``pamm-1/128`` -> ``pamm-1-128``."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", str(self.name))

    @property
    def is_exact(self) -> bool:
        """Whether the model stays as it is."""
        return self.config.method == "exact"

    @property
    def approximates(self) -> bool:
        """Whether some gradient is approximate."""
        return not self.config.is_exact

    def to_dict(self) -> dict[str, Any]:
        """Plain values; rates that come from the run are left out, and q, k and v as targets."""
        values = {"method": "exact"} if self.is_exact else self.config.to_dict()
        if self.targets != "attention":
            values = {**values, "targets": self.targets}
        rates = {"lr": self.lr, "lr_factor": self.lr_factor}
        return values | {key: rate for key, rate in rates.items() if rate is not None}

    @classmethod
    def from_dict(cls, name: str, values: object, seed: int) -> "Arm":
        """Inverse of ``to_dict``; ``seed`` is the run's, taken where the arm names none."""
        if not isinstance(values, dict):
            raise PammError(
                f"arm {name!r} is {values!r}; write a mapping such as "
                "{method: pamm, ratio: 1/128} or {method: exact}."
            )
        keys = [field.name for field in dataclasses.fields(PammConfig)]
        own = ("lr", "lr_factor", "targets")
        check_keys(values, [*keys, *own], f"arm {name!r}")
        more = {key: values[key] for key in own if key in values}
        chosen = {"seed": seed} | {key: values[key] for key in keys if key in values}
        try:
            return cls(name, PammConfig.from_dict(chosen), **more)
        except PammError as error:
            raise PammError(f"arm {name!r}: {error}") from error


def shipped(kind: str, name: str | Path, or_on_the_hub: bool = False) -> Path:
    """A file of ``recipes/KIND`` by its name without a suffix; any other path as it is.

    Raises:
        PammError: for a name without a suffix that is neither, unless it may be one on the hub.
    """
    folder, is_name = Path(__file__).parent / kind, re.fullmatch(NAME, str(name))
    inside, given = folder / f"{name}.yaml", Path(name)
    if is_name and inside.exists():
        return inside
    if is_name and not (or_on_the_hub or given.suffix or given.exists()):
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise PammError(f"{str(name)!r} is no file and not in recipes/{kind}; there are {known}.")
    return given


def folder_name(name: str, value: object) -> None:
    """Raise unless ``value`` names a folder that lies where it is made."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise PammError(
            f"{name} is {value!r}; it names a folder: use letters, digits, '.', '_' and '-'."
        )


def positive(name: str, value: object) -> float:
    """``value`` as a float above 0, or an error."""
    found = number(value)
    if not 0 < found < math.inf:
        raise PammError(f"{name} is {value!r}; give a number above 0.")
    return found


def number(value: object) -> float:
    """A float; also from text, because YAML reads 2e-3 (without a dot) as text."""
    try:
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
