"""What a user sees in the terminal beside the training itself."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[int], None]
"""Told how much more is done; moves a progress bar."""


@contextlib.contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Advance]:
    """A progress bar; gives the function that moves it on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def show_error(error: Exception) -> None:
    """Print the message to stderr; not wrapped, so that paths in it stay whole."""
    line = f"error: {error}"
    Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
