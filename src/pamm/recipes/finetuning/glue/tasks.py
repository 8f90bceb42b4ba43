"""The tasks of GLUE: their columns, classes and metrics, and their rows from files or the hub."""

import csv
import dataclasses
from pathlib import Path

from pamm.errors import PammError, said
from pamm.extras import require

HUB = "hub"


@dataclasses.dataclass(frozen=True)
class Task:
    """One task.

    Args:
        columns: of the text, one sentence or a pair, as GLUE names them.
        metric: a name in ``metrics.METRICS``.
        classes: 1 is a number to be predicted.
        validation: split that is scored.
    """

    columns: tuple[str, ...]
    metric: str = "accuracy"
    classes: int = 2
    validation: str = "validation"


_PAIR = ("sentence1", "sentence2")

TASKS = {
    "cola": Task(("sentence",), "matthews"),
    "stsb": Task(_PAIR, "pearson", classes=1),
    "mrpc": Task(_PAIR, "f1"),
    "rte": Task(_PAIR),
    "sst2": Task(("sentence",)),
    "mnli": Task(("premise", "hypothesis"), classes=3, validation="validation_matched"),
    "qnli": Task(("question", "sentence")),
    "qqp": Task(("question1", "question2")),
}
"""In the order of the paper's table, with its metrics."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Texts, each one sentence or a pair, and their labels."""

    texts: list[tuple[str, ...]]
    labels: list[float]


def read_task(name: str, data: str) -> tuple[Rows, Rows]:
    """Training and validation rows of a task.

    Args:
        name: one of ``TASKS``.
        data: ``"hub"``, or a folder with NAME/train.tsv and NAME/validation.tsv: tab-separated,
            UTF-8, one header line, no quoting.

    Raises:
        PammError: if a file is not there or not of this form.
    """
    task = TASKS[name]
    splits = ("train", task.validation)
    if data == HUB:
        return _from_hub(name, splits[0]), _from_hub(name, splits[1])
    return tuple(read_tsv(Path(data) / name / f"{split}.tsv", task) for split in splits)  # type: ignore[return-value]


def read_tsv(path: Path, task: Task) -> Rows:
    """The rows of one file; its last column is the label, whatever it is called."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no header line, or not UTF-8"
        raise PammError(f"cannot read {path}: {reason}. Give a tab-separated file.") from error
    if tuple(header[:-1]) != task.columns or header[-1] not in ("label", "score"):
        raise PammError(
            f"{path} has the columns {', '.join(header)}; it needs {', '.join(task.columns)} and "
            "label (or score) in its first line."
        )
    texts, labels = [], []
    for number, line in enumerate(lines, start=2):
        try:
            *text, label = line
            value = float(label)
            allowed = task.classes == 1 or value in range(task.classes)
            if len(text) != len(task.columns) or not allowed:
                raise ValueError
        except ValueError:
            kind = "a number" if task.classes == 1 else f"a class below {task.classes}"
            raise PammError(
                f"line {number} of {path} is {line!r}; it needs {len(task.columns)} text(s) and "
                f"{kind}, separated by tabs."
            ) from None
        texts.append(tuple(text))
        labels.append(value)
    if not texts:
        raise PammError(f"{path} has no rows below its first line.")
    return Rows(texts, labels)


def _from_hub(name: str, split: str) -> Rows:
    require("train", "datasets")
    import datasets

    try:
        found = datasets.load_dataset("nyu-mll/glue", name, split=split)
    except Exception as error:  # of many kinds: no network, no such set
        raise PammError(
            f"cannot load {name} of GLUE from the hub: {said(error)}. Give a folder of files as "
            "data."
        ) from error
    columns = [found[column] for column in TASKS[name].columns]
    return Rows(list(zip(*columns, strict=True)), [float(label) for label in found["label"]])
