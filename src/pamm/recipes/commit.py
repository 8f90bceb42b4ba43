"""Which state of the source a result is from."""

import os
import subprocess
from pathlib import Path


def commit() -> str | None:
    """Of the checkout this file belongs to; a copy that is in none may name it in PAMM_COMMIT."""
    here = Path(__file__)
    if named := os.environ.get("PAMM_COMMIT"):
        return named
    try:
        _git(here, "ls-files", "--error-unmatch", here.name)  # it may be installed in another's
        return _git(here, "rev-parse", "--short", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(file: Path, *arguments: str) -> str:
    command = ["git", "-C", str(file.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
