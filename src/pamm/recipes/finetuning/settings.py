"""What every fine-tuning says: arms, rates, seeds. Frozen; read from and written to YAML, JSON."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from pamm.config import check_fields, read_mapping, whole_number
from pamm.errors import PammError
from pamm.recipes.settings import Arm, folder_name, positive, shipped

PRECISIONS = ("auto", "bf16", "fp32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What ``GlueConfig`` and ``VlmConfig`` have in common.

    Args:
        name: of the run's folder.
        model: a name on the hub or a folder.
        data: a folder, or a word for data that come from elsewhere.
        arms: what is compared. One with an ``lr`` or ``lr_factor`` is not tuned in it.
        lrs: learning rates to choose from.
        lr_factors: of the weights trained by PAMM, to choose from; exact arms have 1.
        epochs: passes over the training rows; may end within one.
        batch_size: rows in a step.
        precision: ``"bf16"`` (autocast), ``"fp32"``, or ``"auto"``: bf16 on CUDA.
        weight_decay: of matrices.
        seeds: of new weights, batches, dropout and draws.

    Raises:
        PammError: if a value is outside what is allowed.
    """

    name: str
    model: str
    data: str
    arms: tuple[Arm, ...]
    lrs: tuple[float, ...]
    lr_factors: tuple[float, ...]
    epochs: float
    batch_size: int
    precision: str = "auto"
    weight_decay: float = 0.0
    seeds: tuple[int, ...] = (0, 1, 2)

    arm: ClassVar[type[Arm]] = Arm
    may_grow: ClassVar[tuple[str, ...]] = ("arms", "seeds")
    """Keys that may differ when a folder's fine-tuning goes on: what is there stays what it is."""

    def __post_init__(self) -> None:
        folder_name("name", self.name)
        for key in ("model", "data"):
            check_text(key, getattr(self, key))
        for key in ("lrs", "lr_factors", "seeds"):
            object.__setattr__(self, key, distinct(key, getattr(self, key)))
        for key in ("lrs", "lr_factors"):
            numbers = sorted(positive(key, value) for value in getattr(self, key))
            object.__setattr__(self, key, tuple(numbers))
        object.__setattr__(self, "epochs", positive("epochs", self.epochs))
        whole_number("batch_size", self.batch_size, least=1)
        for seed in self.seeds:
            whole_number("seeds", seed, least=0)
        if self.precision not in PRECISIONS:
            allowed = ", ".join(PRECISIONS)
            raise PammError(f"precision is {self.precision!r}; choose one of {allowed}.")
        decay = self.weight_decay
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise PammError(f"weight_decay is {decay!r}; give a number from 0 to below 1.")
        folders = [arm.folder for arm in self.arms]
        if not folders or len(set(folders)) < len(folders):
            raise PammError(f"arms are {folders}; give at least one, with names that differ.")
        for arm in self.arms:
            if arm.targets != "attention":
                raise PammError(
                    f"targets of arm {arm.name!r} is {arm.targets!r}; leave it out: fine-tunings "
                    "convert q, k and v."
                )

    def batch_of(self, task: str) -> int:
        """Rows in a step of a task."""
        return self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return plain | {"arms": {arm.name: arm.to_dict() for arm in self.arms}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of ``to_dict``; an unknown key or a missing one is an error."""
        check_fields(cls, values, "the fine-tuning")
        if not isinstance(values["arms"], dict):
            raise PammError(f"arms is {values['arms']!r}; write lines, exact: {{method: exact}}.")
        arms = tuple(cls.arm.from_dict(name, arm, seed=0) for name, arm in values["arms"].items())
        return cls(**{**values, "arms": arms})

    def to_yaml(self) -> str:
        """Text of a file that ``load`` reads."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a YAML or JSON file, or one that comes with the package, by its name."""
        path = shipped("runs", path)
        try:
            return cls.from_dict(read_mapping(path))
        except PammError as error:
            raise error if str(path) in str(error) else PammError(f"{path}: {error}") from error


def check_text(name: str, value: object) -> None:
    """Raise unless ``value`` is text, and not empty."""
    if not isinstance(value, str) or not value:
        raise PammError(f"{name} is {value!r}; give text.")


def distinct(name: str, value: object) -> tuple[Any, ...]:
    """A tuple of a list that has at least one value, and none twice."""
    if not isinstance(value, list | tuple) or not value or len(set(value)) < len(value):
        raise PammError(f"{name} is {value!r}; give a list of one or more, none twice.")
    return tuple(value)
