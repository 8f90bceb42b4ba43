"""What a fine-tuning on GLUE is: one frozen object, read from and written to YAML or JSON."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from pamm.config import check_keys, read_mapping
from pamm.errors import PammError
from pamm.recipes.glue_tasks import TASKS
from pamm.recipes.settings import Arm, positive, shipped, whole_number

PRECISIONS = ("auto", "bf16", "fp32")


@dataclasses.dataclass(frozen=True)
class GlueConfig:
    """Fine-tunings of one encoder: every task with every arm, tuned alike, with several seeds.

    First, on ``factor_task`` and with the first seed, every rate with every factor: the best pair
    gives an arm its factor. Then on each task every rate, with the first seed; the best one is
    trained with every seed. Both are chosen by the validation score, as in the paper.

    Args:
        name: of the run's folder.
        model: a name on the hub or a folder: an encoder with a tokenizer.
        data: ``hub``, or a folder with TASK/train.tsv and TASK/validation.tsv.
        tasks: names of ``glue_tasks.TASKS``.
        arms: what is compared; see ``Arm``. One with an ``lr`` or ``lr_factor`` is not tuned in it.
        lrs: learning rates to choose from.
        lr_factors: of the weights trained by PAMM, to choose from; exact arms have 1.
        factor_task: on which the factor is chosen.
        epochs: passes over the training rows; may end within one.
        batch_size: rows in a step.
        batch_sizes: of tasks that have another.
        max_length: tokens of a row, at most.
        skip_padding: whether padding is left out where generators are drawn.
        precision: ``"bf16"`` (autocast), ``"fp32"``, or ``"auto"``: bf16 on CUDA.
        weight_decay: of matrices.
        seeds: of the head, batches, dropout and draws.

    Raises:
        PammError: if a value is outside what is allowed.
    """

    name: str
    model: str
    data: str
    tasks: tuple[str, ...]
    arms: tuple[Arm, ...]
    lrs: tuple[float, ...] = (1e-5, 2e-5, 3e-5)
    lr_factors: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    factor_task: str = "rte"
    epochs: float = 30.0
    batch_size: int = 16
    batch_sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"cola": 32})
    max_length: int = 512
    skip_padding: bool = True
    precision: str = "auto"
    weight_decay: float = 0.0
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        for key in ("name", "model", "data", "factor_task"):
            if not isinstance(getattr(self, key), str) or not getattr(self, key):
                raise PammError(f"{key} is {getattr(self, key)!r}; give text.")
        for key in ("tasks", "lrs", "lr_factors", "seeds"):
            value = getattr(self, key)
            if not isinstance(value, list | tuple) or not value or len(set(value)) < len(value):
                raise PammError(f"{key} is {value!r}; give a list of one or more, none twice.")
            object.__setattr__(self, key, tuple(value))
        if not isinstance(self.batch_sizes, dict):
            raise PammError(f"batch_sizes is {self.batch_sizes!r}; write TASK: NUMBER lines.")
        for task in (*self.tasks, self.factor_task, *self.batch_sizes):
            if task not in TASKS:
                raise PammError(f"there is no task {task!r}; choose from {', '.join(TASKS)}.")
        for key in ("lrs", "lr_factors"):
            numbers = sorted(positive(key, value) for value in getattr(self, key))
            object.__setattr__(self, key, tuple(numbers))
        object.__setattr__(self, "epochs", positive("epochs", self.epochs))
        for key, least in (("batch_size", 1), ("max_length", 8)):
            whole_number(key, getattr(self, key), least)
        for task, size in self.batch_sizes.items():
            whole_number(f"batch_sizes of {task}", size, least=1)
        for seed in self.seeds:
            whole_number("seeds", seed, least=0)
        if not isinstance(self.skip_padding, bool):
            raise PammError(f"skip_padding is {self.skip_padding!r}; give true or false.")
        if self.precision not in PRECISIONS:
            allowed = ", ".join(PRECISIONS)
            raise PammError(f"precision is {self.precision!r}; choose one of {allowed}.")
        decay = self.weight_decay
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise PammError(f"weight_decay is {decay!r}; give a number from 0 to below 1.")
        folders = [arm.folder for arm in self.arms]
        if not folders or len(set(folders)) < len(folders):
            raise PammError(f"arms are {folders}; give at least one, with names that differ.")

    def batch_of(self, task: str) -> int:
        """Rows in a step of a task."""
        return self.batch_sizes.get(task, self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return plain | {"arms": {arm.name: arm.to_dict() for arm in self.arms}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "GlueConfig":
        """Inverse of ``to_dict``; an unknown key or a missing one is an error."""
        fields = dataclasses.fields(cls)
        check_keys(values, [field.name for field in fields], "the fine-tuning")
        needed = ("name", "model", "data", "tasks", "arms")
        if missing := [name for name in needed if name not in values]:
            raise PammError(f"the fine-tuning lacks {', '.join(missing)}. Add it.")
        if not isinstance(values["arms"], dict):
            raise PammError(f"arms is {values['arms']!r}; write lines, exact: {{method: exact}}.")
        arms = tuple(Arm.from_dict(name, arm, seed=0) for name, arm in values["arms"].items())
        return cls(**{**values, "arms": arms})

    def to_yaml(self) -> str:
        """Text of a file that ``load`` reads."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def load(cls, path: str | Path) -> "GlueConfig":
        """Read a YAML or JSON file, or one that comes with the package, by its name."""
        path = shipped("runs", path)
        try:
            return cls.from_dict(read_mapping(path))
        except PammError as error:
            raise error if str(path) in str(error) else PammError(f"{path}: {error}") from error
