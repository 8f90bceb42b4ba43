"""What a fine-tuning on GLUE is."""

import dataclasses
from typing import ClassVar

from pamm.config import whole_number
from pamm.errors import PammError
from pamm.recipes.finetuning.glue.tasks import TASKS
from pamm.recipes.finetuning.settings import FinetuneConfig, check_text, distinct


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlueConfig(FinetuneConfig):
    """Fine-tunings of one encoder: every task with every arm, tuned alike, with several seeds.

    First, on ``factor_task`` and with the first seed, every rate with every factor: the best pair
    gives an arm its factor. Then on each task every rate, with the first seed; the best one is
    trained with every seed. Both are chosen by the validation score, as in the paper.

    Args, besides those of ``FinetuneConfig``:
        model: an encoder with a tokenizer.
        data: ``hub``, or a folder with TASK/train.tsv and TASK/validation.tsv.
        tasks: names of ``tasks.TASKS``.
        factor_task: on which the factor is chosen.
        batch_sizes: of tasks that have another.
        max_length: tokens of a row, at most.
        skip_padding: whether padding is left out where generators are drawn, by PAMM without a
            tolerance.
    """

    tasks: tuple[str, ...]
    lrs: tuple[float, ...] = (1e-5, 2e-5, 3e-5)
    lr_factors: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    factor_task: str = "rte"
    epochs: float = 30.0
    batch_size: int = 16
    batch_sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"cola": 32})
    max_length: int = 512
    skip_padding: bool = True

    may_grow: ClassVar[tuple[str, ...]] = ("tasks", *FinetuneConfig.may_grow)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("factor_task", self.factor_task)
        object.__setattr__(self, "tasks", distinct("tasks", self.tasks))
        if not isinstance(self.batch_sizes, dict):
            raise PammError(f"batch_sizes is {self.batch_sizes!r}; write TASK: NUMBER lines.")
        for task in (*self.tasks, self.factor_task, *self.batch_sizes):
            if task not in TASKS:
                raise PammError(f"there is no task {task!r}; choose from {', '.join(TASKS)}.")
        whole_number("max_length", self.max_length, least=8)
        for task, size in self.batch_sizes.items():
            whole_number(f"batch_sizes of {task}", size, least=1)
        if not isinstance(self.skip_padding, bool):
            raise PammError(f"skip_padding is {self.skip_padding!r}; give true or false.")

    def batch_of(self, task: str) -> int:
        """Rows in a step of a task."""
        return self.batch_sizes.get(task, self.batch_size)
