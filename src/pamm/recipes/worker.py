"""A worker of a study: takes one open training after the other, until the study is over.

    python -m pamm.recipes.worker STUDY_FOLDER

Exit codes: 0 done, 2 refused, 130 stopped with a checkpoint.
"""

import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console

from pamm.errors import PammError
from pamm.recipes.ablate import DATA, RUN, STUDY, check_run
from pamm.recipes.console import show_error
from pamm.recipes.files import lock, write_text
from pamm.recipes.stop import Stop
from pamm.recipes.study import FAILED, Run, Study

_PAUSE_S = 2.0  # between looks at what the others do


class Job(Protocol):
    """A training that a worker can take; ``study.Run`` is one."""

    @property
    def folder(self) -> Path: ...
    @property
    def title(self) -> str: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def note(self) -> str: ...


J = TypeVar("J", bound=Job)


def main(folder: Path) -> int:
    """Work; returns the exit code."""
    stop = Stop()
    stop.listen()
    try:
        study = Study.load(folder / STUDY)
        return work_off(
            lambda: study.to_do(folder),
            begin=_begin,
            train=lambda run: _train(run, folder, stop, study.keeps_checkpoints(run)),
            stop=stop,
            keeps_checkpoints=study.keeps_checkpoints,
        )
    except PammError as error:
        show_error(error)
        return 2


def work_off(
    to_do: Callable[[], list[J]],
    begin: Callable[[J], None],
    train: Callable[[J], bool],
    stop: Stop,
    keeps_checkpoints: Callable[[J], bool] = lambda job: False,
) -> int:
    """Take one job after the other until none is left; returns the exit code.

    Args:
        to_do: what can be trained now, by anybody.
        begin: writes down what the job is, or refuses it.
        train: does it; False if ``stop`` was asked before it was finished.
        stop: asked for by a signal.
        keeps_checkpoints: whether those of a finished job stay.
    """
    while not stop.asked:
        todo = to_do()
        if not todo:
            return 0
        if not any(_take(job, begin, train, keeps_checkpoints(job)) for job in todo):
            time.sleep(_PAUSE_S)
    return 130


def _take(
    job: J, begin: Callable[[J], None], train: Callable[[J], bool], keep_checkpoints: bool
) -> bool:
    """Do the job unless another worker does; returns whether it was ours."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with lock(job.folder / ".lock") as is_ours:
        if not is_ours or job.is_over:
            return False
        begin(job)
        start = time.monotonic()
        try:
            if not train(job):
                return True
            note = job.note
        except Exception as error:  # one that fails, out of memory say, does not stop the others
            write_text(job.folder / FAILED, traceback.format_exc())
            note = f"failed: {' '.join(str(error).split())}"
        if not keep_checkpoints:
            for checkpoint in job.folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        line = f"{job.title}: {note} ({time.monotonic() - start:,.0f} s)"
        Console().print(line, markup=False, highlight=False, soft_wrap=True)
    return True


def _begin(run: Run) -> None:
    check_run(run)
    write_text(run.folder / RUN, run.config.to_yaml())


def _train(run: Run, folder: Path, stop: Stop, keep_last: bool) -> bool:
    from pamm.recipes.tokens import Tokens
    from pamm.recipes.training import train_arm

    tokens, quiet = Tokens.open(folder / DATA), Console(quiet=True)
    return train_arm(run.config, run.arm, run.folder, tokens, quiet, stop, keep_last)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
