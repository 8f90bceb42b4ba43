"""A worker of a study: takes one open training after the other, until the study is over.

    python -m pamm.recipes.studies.worker STUDY_FOLDER

Exit codes: 0 done, 2 refused, 130 stopped with a checkpoint.
"""

import sys
from pathlib import Path

from rich.console import Console

from pamm.errors import PammError
from pamm.recipes.console import show_error
from pamm.recipes.files import write_text
from pamm.recipes.stop import Stop
from pamm.recipes.studies.ablate import DATA, RUN, STUDY, check_run
from pamm.recipes.studies.study import Run, Study
from pamm.recipes.workers import work_off


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


def _begin(run: Run) -> None:
    check_run(run)
    write_text(run.folder / RUN, run.config.to_yaml())


def _train(run: Run, folder: Path, stop: Stop, keep_last: bool) -> bool:
    from pamm.recipes.pretraining.tokens import Tokens
    from pamm.recipes.pretraining.training import train_arm

    tokens, quiet = Tokens.open(folder / DATA), Console(quiet=True)
    return train_arm(run.config, run.arm, run.folder, tokens, quiet, stop, keep_last)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
