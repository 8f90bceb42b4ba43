"""What fine-tunings found: written, shown, and as text in tables."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pamm.recipes.files import write_text

ROWS = "results.jsonl"
"""A row for each task and arm, as ``Plan.rows`` gives them."""


def show_results(
    folder: Path,
    rows: list[dict[str, Any]],
    table: Table,
    note: str,
    files: Mapping[str, str | bytes],
    console: Console,
) -> None:
    """Write the rows and other files into the folder; print the table and where things are."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name, content in {ROWS: lines, **files}.items():
        if isinstance(content, str):
            write_text(folder / name, content)
        else:
            (folder / name).write_bytes(content)
    console.print(table)
    console.print(note, highlight=False)
    for name in (ROWS, *files):
        console.print(f"  {folder / name}", markup=False, highlight=False, soft_wrap=True)


def score_text(row: dict[str, Any]) -> str:
    """Mean and spread in %, with a star where it is below the spread of full fine-tuning."""
    if row["mean"] is None:
        return "not finite"
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
    return f"{100 * row['mean']:.2f}{spread}{'' if row.get('within_exact', True) else ' *'}"
