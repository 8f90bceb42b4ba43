"""Results as JSON lines, each stamped with the machine, the versions and the commit."""

import datetime
import importlib.metadata
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import pamm
from pamm.errors import PammError
from pamm.recipes.commit import commit

Record = dict[str, Any]


def environment(device: torch.device) -> Record:
    """What a number depends on beside the code measured."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "pamm": pamm.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def append(path: Path, records: Iterable[Record]) -> None:
    """Add records to a file of JSON lines; what is there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def load(folder: Path) -> list[Record]:
    """All records of the ``.jsonl`` files under a folder, files in the order of their names."""
    files = sorted(folder.rglob("*.jsonl"))
    if not files:
        raise PammError(
            f"no .jsonl file in {folder}; run pamm bench with --results {folder} first."
        )
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
