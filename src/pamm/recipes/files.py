"""Files that a kill never leaves half written, and JSON lines that may have been cut short."""

import json
import os
from pathlib import Path
from typing import Any


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
