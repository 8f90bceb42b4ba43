"""The Trainer's checkpoints in the folder of a training. Imports nothing slow."""

import shutil
from pathlib import Path

from pamm.errors import PammError
from pamm.recipes.files import read_json
from pamm.recipes.ranks import processes, rank


def last_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """The newest checkpoint that was written to its end, and its step; removes unfinished ones.

    Raises:
        PammError: if all there are lack states of processes that this run has: of fewer, or of as
            many that were stopped while they wrote.
    """
    whole, part = {}, []
    for path in folder.glob("checkpoint-*"):
        try:  # the Trainer writes this file last, but for the states of other processes
            step = read_json(path / "trainer_state.json")["global_step"]
        except (OSError, ValueError):
            if rank() == 0:
                shutil.rmtree(path)
            continue
        if processes() == 1 or len(list(path.glob("rng_state_*"))) >= processes():
            whole[step] = path
        else:
            part.append(path)
    if part and not whole:
        raise PammError(
            f"{part[0]} does not have the states of {processes()} processes. Go on with as many "
            "processes as before; or if it is all there is of a run that was stopped while it "
            "wrote it, or you want to begin anew, remove it first."
        )
    if rank() == 0:
        for path in part:
            shutil.rmtree(path)
    step = max(whole, default=0)
    return whole.get(step), step


def remove_checkpoints(folder: Path) -> None:
    """Those of a run that is over."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
