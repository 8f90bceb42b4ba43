"""One frozen object that says how inputs are compressed. All validation lives here."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from pamm.errors import PammError

METHODS = ("pamm", "subspace", "uniform_crs", "compact", "recompute", "sampled", "exact")
DEFAULT_METHOD = "sampled"
DEFAULT_RATIO = {"subspace": 3 / 8, "sampled": 2 / 3}
BACKENDS = ("auto", "triton", "torch")


@dataclasses.dataclass(frozen=True)
class PammConfig:
    """How the input of a group of linear layers is kept for backward.

    Args:
        method: ``"pamm"`` (the paper's method), ``"subspace"`` (every token on some directions,
            in 4 and 2 bits a number: ``pamm.subspace``), ``"uniform_crs"`` (keep the generators,
            drop every other row: PAMM with tolerance 0), ``"compact"`` (keep random projections of
            the features), ``"recompute"`` (keep nothing: the norm that made X makes it again in
            backward, and the gradient is exact), ``"sampled"`` (the same, and of its rows only
            some enter the gradient, drawn by the size of their tokens' gradients:
            ``pamm.sampling``) or ``"exact"`` (keep X; the control in comparisons). ``"sampled"``
            if left out: of what frees nearly all of X and is no slower than exact training on a
            large model, it costs least (docs/quality.md).
        ratio: r, the share of the b tokens kept as generators, 0 < r <= 1:
            k = min(b, max(1, ceil(r b))); 1/512 if left out. With ``"subspace"`` and ``"compact"``
            the share of the n features kept as directions; with ``"subspace"`` 3/8 if left out.
            With ``"sampled"`` the share of the tokens drawn in backward, 2/3 if left out; of 1
            nothing is drawn, and the gradient is exact but for the rounding (``fp8``).
            ``"recompute"`` and ``"exact"`` have none. A string such as ``"1/512"`` is read as a
            fraction.
        tolerance: epsilon of the paper's eq. 3, relative to a row's norm: a row is kept if
            ||A_i - A~_i|| <= epsilon ||A_i||. ``None`` (or infinity) keeps every row, which the
            paper found best; 0 keeps the generators alone; 1 and above equal ``None``.
        directions: of ``"sampled"`` alone: the number of directions of X whose part of the
            gradient is taken from all tokens; at most a quarter of the n features, none if left
            out. With some of them fewer tokens serve, which pays for gate and up
            (docs/quality.md). They follow X from step to step: ``pamm.carried``.
        fp8: of ``"sampled"`` alone: whether drawn rows are rounded to 8 bits (e4m3) before they
            are multiplied, which takes half of the time, where the GPU can (compute capability 8.9
            and above) and the gradient has 16: ``pamm.fp8``. True if left out; with False they
            keep the gradient's dtype on every device.
        seed: of the private stream that draws generators. The global random state is never used.
        backend: ``"auto"`` (Triton's kernels on a GPU, plain PyTorch elsewhere; the environment
            variable PAMM_BACKEND may decide), ``"triton"`` or ``"torch"``.

    Raises:
        PammError: if a value is outside what is allowed, or is given without the method that
            says what it means.

    Examples:
        >>> PammConfig("pamm", "1/128").generators(tokens=4096)
        32
        >>> PammConfig() == PammConfig("sampled", ratio=2 / 3)
        True
    """

    method: str = None  # type: ignore[assignment]  # a name once made
    ratio: float = None  # type: ignore[assignment]  # a number once made
    tolerance: float | None = None
    directions: int | None = None
    fp8: bool | None = None
    seed: int = 0
    backend: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tolerance", _tolerance(self.tolerance))
        ratio = None if self.ratio is None else _ratio(self.ratio)
        if self.method is None:
            for name in ("ratio", "tolerance", "directions"):
                if (value := getattr(self, name)) is not None:
                    raise PammError(
                        f"{name} is {value}, but what it means depends on the method, and none "
                        "is given; method 'pamm' is the paper's."
                    )
            object.__setattr__(self, "method", DEFAULT_METHOD)
        if self.method not in METHODS:
            raise PammError(f"method is {self.method!r}; choose one of {', '.join(METHODS)}.")
        if self.tolerance is not None and self.method != "pamm":
            raise PammError(
                f"tolerance is {self.tolerance:g}, which method 'pamm' alone has; leave it out "
                f"with {self.method!r}."
            )
        object.__setattr__(self, "directions", self._directions())
        object.__setattr__(self, "fp8", self._fp8())
        check_backend(self.backend)
        if ratio is not None and self.is_exact:
            raise PammError(
                f"ratio is {ratio:g}, which exact methods do not have; leave it out with "
                f"{self.method!r}."
            )
        if ratio is None and not self.is_exact:
            ratio = DEFAULT_RATIO.get(self.method, 1 / 512)
        object.__setattr__(self, "ratio", ratio)
        # As text: a number that differs between two models torch.compile may turn into a symbol.
        share = Fraction(ratio or 1).limit_denominator(1 << 20)
        object.__setattr__(self, "_share", f"{share.numerator}/{share.denominator}")
        whole_number("seed", self.seed, least=0)

    def _directions(self) -> int | None:
        value = self.directions
        if self.method != "sampled":
            if value:  # 0 is what replacing the method of a configuration leaves
                raise PammError(
                    f"directions is {value}, which method 'sampled' alone has; leave it out with "
                    f"{self.method!r}."
                )
            return None
        if value is None:
            return 0
        whole_number("directions", value, least=0)
        return value

    def _fp8(self) -> bool | None:
        value = self.fp8
        if not isinstance(value, bool | None):
            raise PammError(f"fp8 is {value!r}; give True or False, or leave it out.")
        if self.method == "sampled":
            return value is not False
        if value is False:  # True is what replacing the method of a configuration leaves
            raise PammError(
                f"fp8 is {value}, which method 'sampled' alone has; leave it out with "
                f"{self.method!r}."
            )
        return None

    @property
    def is_exact(self) -> bool:
        """Whether the weight gradient is exact."""
        return self.method in ("recompute", "exact")

    @property
    def recomputes(self) -> bool:
        """Whether what made X makes it again in backward."""
        return self.method in ("recompute", "sampled")

    def generators(self, tokens: int) -> int:
        """k = min(b, max(1, ceil(r b))), in integer arithmetic so that 0.1 * 30 is 3 and not 4."""
        above, below = self._share.split("/")  # type: ignore[attr-defined]
        return min(tokens, max(1, -(-tokens * int(above) // int(below))))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON or YAML."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PammConfig:
        """Inverse of ``to_dict``; an unknown key is an error."""
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, Mapping):
            raise PammError(
                f"the PAMM configuration is {values!r}; give a mapping, with keys of "
                f"{', '.join(names)}."
            )
        check_keys(values, names, "the PAMM configuration")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write to a ``.json``, ``.yaml`` or ``.yml`` file."""
        path = Path(path)
        text = (
            json.dumps(self.to_dict(), indent=2) + "\n"
            if _suffix(path) == "json"
            else yaml.safe_dump(self.to_dict(), sort_keys=False)
        )
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PammError(f"cannot write {path}: {error.strerror}.") from error

    @classmethod
    def load(cls, path: str | Path) -> PammConfig:
        """Read a file that ``save`` wrote, or that a person did."""
        return cls.from_dict(read_mapping(path))


def checked(config: object) -> PammConfig:
    """``config``; an error if it is none."""
    if not isinstance(config, PammConfig):
        raise PammError(
            f"config is {config!r}; give a PammConfig, such as "
            'PammConfig("pamm", 1 / 512) or PammConfig("recompute").'
        )
    return config


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a JSON or YAML file that holds one mapping; anything else is an error."""
    path = Path(path)
    suffix = _suffix(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PammError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise PammError(f"{path} is not text in UTF-8; give a JSON or YAML file.") from error
    try:
        values = json.loads(text) if suffix == "json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise PammError(f"{path} is not valid {suffix.upper()}: {error}") from error
    if not isinstance(values, dict):
        raise PammError(f"{path} holds {type(values).__name__}; write 'key: value' lines instead.")
    return values


def whole_number(name: str, value: object, least: int) -> None:
    """Raise unless ``value`` is a whole number, ``least`` or above."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PammError(f"{name} is {value!r}; give a whole number, {least} or above.")


def check_backend(value: object) -> None:
    """Raise unless it is one of ``BACKENDS``."""
    if value not in BACKENDS:
        raise PammError(f"backend is {value!r}; choose one of {', '.join(BACKENDS)}.")


def check_keys(values: dict[str, Any], allowed: list[str], where: str) -> None:
    """Refuse keys that nothing would read, and say which name was probably meant."""
    for key in values:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise PammError(f"{where} has no key {key!r}{hint} Allowed: {', '.join(allowed)}.")


def check_fields(made: type, values: dict[str, Any], where: str) -> None:
    """Refuse keys that are no fields of a dataclass, and fields without a default that lack."""
    fields, none = dataclasses.fields(made), dataclasses.MISSING
    check_keys(values, [field.name for field in fields], where)
    needed = [each.name for each in fields if each.default is none and each.default_factory is none]
    if missing := [name for name in needed if name not in values]:
        raise PammError(f"{where} lacks {', '.join(missing)}. Add it.")


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in (".json", ".yaml", ".yml"):
        raise PammError(f"{path} must end in .json, .yaml or .yml.")
    return "json" if suffix == ".json" else "yaml"


def _ratio(value: object) -> float:
    try:
        number = float(Fraction(value)) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, ZeroDivisionError):
        number = math.nan
    if not 0 < number <= 1 or isinstance(value, bool):
        raise PammError(f"ratio is {value!r}; give a number above 0 and at most 1, such as 1/512.")
    return number


def _tolerance(value: object) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number) or number < 0 or isinstance(value, bool):
        raise PammError(
            f"tolerance is {value!r}; give a number, 0 or above, or None to keep every row."
        )
    return None if math.isinf(number) else number
