"""The Trainer's checkpoints in the folder of a training. Imports nothing slow."""

import shutil
from pathlib import Path

from pamm.recipes.files import read_json
from pamm.recipes.ranks import processes, rank


def last_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """The newest checkpoint that was written to its end, and its step; removes unfinished ones."""
    newest, at = None, 0
    for path in folder.glob("checkpoint-*"):
        try:  # the Trainer writes this file last; with several processes, each a state of its own
            step = read_json(path / "trainer_state.json")["global_step"]
            if processes() > 1 and len(list(path.glob("rng_state_*"))) < processes():
                raise OSError
        except (OSError, ValueError):
            if rank() == 0:
                shutil.rmtree(path)
            continue
        if step > at:
            newest, at = path, step
    return newest, at


def remove_checkpoints(folder: Path) -> None:
    """Those of a run that is over."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
