"""Which versions, and which state of the source, a result is from."""

import functools
import os
import platform
import subprocess
from pathlib import Path

import pamm


@functools.cache
def commit() -> str | None:
    """Of the checkout this file belongs to; a copy that is in none may name it in PAMM_COMMIT.

    As it was when it was first asked for: what a process runs stays, where its checkout goes on.
    """
    here = Path(__file__)
    if named := os.environ.get("PAMM_COMMIT"):
        return named
    try:
        _git(here, "ls-files", "--error-unmatch", here.name)  # it may be installed in another's
        return _git(here, "rev-parse", "--short", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str | None]:
    """Of what a training runs on, and the commit."""
    import torch
    import transformers

    return {
        "pamm": pamm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def _git(file: Path, *arguments: str) -> str:
    command = ["git", "-C", str(file.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
