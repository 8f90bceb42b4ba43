"""The Trainer's checkpoints in the folder of a training. Imports nothing slow."""

import shutil
from pathlib import Path

from pamm.errors import PammError
from pamm.recipes.files import read_json
from pamm.recipes.ranks import processes, rank


def last_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """The newest checkpoint that was written to its end, and its step; removes unfinished ones.

    Raises:
        PammError: if the newest has the states of more or fewer processes than this run.
    """
    found = {}
    for path in folder.glob("checkpoint-*"):
        try:  # the Trainer writes this file last, but for the states of other processes
            found[read_json(path / "trainer_state.json")["global_step"]] = path
        except (OSError, ValueError):
            if rank() == 0:
                shutil.rmtree(path)
    states = {step: _states(path) for step, path in found.items()}
    newest = max(found, default=0)
    if found and states[newest] < processes() in states.values():
        if rank() == 0:  # the run was stopped while other processes wrote
            shutil.rmtree(found.pop(newest))
        newest = max(step for step in states if step != newest)
    if found and states[newest] != processes():
        raise PammError(
            f"{found[newest]} has the states of {states[newest]} processes; there are "
            f"{processes()} now. Go on with as many as before, or remove it to begin before it."
        )
    return found.get(newest), newest


def _states(checkpoint: Path) -> int:
    """Of how many processes it has the states; one by itself writes rng_state.pth."""
    return len(list(checkpoint.glob("rng_state_*"))) or 1


def remove_checkpoints(folder: Path) -> None:
    """Those of a run that is over."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
