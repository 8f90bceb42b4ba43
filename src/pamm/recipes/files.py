"""Files that a kill never leaves half written, and JSON lines that may have been cut short."""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pamm.errors import PammError

CONFIG = "config.yaml"
"""Of a run: what was asked for."""

RESULT, METRICS, FAILED = "result.json", "metrics.jsonl", "failed.txt"
"""Of a training: what it found, written last; a line for each step; why it failed."""


def write_text(path: Path, text: str) -> None:
    """Write under another name first, then rename."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_json(path: Path, values: object) -> None:
    """Write one JSON value; NaN and infinity are an error, for JSON has none."""
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_json_lines(path: Path) -> list[Any]:
    """The JSON values in the lines of a file, none if there is no file.

    A last line without an end is left out: the process was killed while it wrote.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def finite(number: float) -> float | None:
    """None in place of NaN and infinity, which JSON has not."""
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Make the folder; what cannot be written while this is open is an error that says so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise PammError(
            f"cannot write in {folder}: {error.strerror}. Choose another output folder."
        ) from error


def is_over(folder: Path) -> bool:
    """Whether a training is finished, or failed since its command was last given."""
    return any((folder / name).exists() for name in (RESULT, FAILED))


@contextlib.contextmanager
def lock(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold a lock file; gives whether it is ours. It is free again when its processes are gone.

    Processes that this one starts with its files open hold it too.

    Args:
        path: of the file, made if it is not there.
        wait: until it is free.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        os.set_inheritable(file.fileno(), True)
        yield True
