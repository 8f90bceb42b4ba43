"""A worker of a study: takes one open training after the other, until the study is over.

    python -m pamm.recipes.worker STUDY_FOLDER

Exit codes: 0 done, 2 refused, 130 stopped with a checkpoint.
"""

import shutil
import sys
import time
import traceback
from pathlib import Path

from rich.console import Console

from pamm.errors import PammError
from pamm.recipes.ablate import DATA, RUN, STUDY, check_run
from pamm.recipes.console import show_error
from pamm.recipes.files import lock, write_text
from pamm.recipes.stop import Stop
from pamm.recipes.study import FAILED, Run, Study

_PAUSE_S = 2.0  # between looks at what the others do


def main(folder: Path) -> int:
    """Work; returns the exit code."""
    stop = Stop()
    stop.listen()
    try:
        study = Study.load(folder / STUDY)
        while not stop.asked:
            todo = study.to_do(folder)
            if not todo:
                return 0
            if not any(_take(run, study, folder, stop) for run in todo):
                time.sleep(_PAUSE_S)
    except PammError as error:
        show_error(error)
        return 2
    return 130


def _take(run: Run, study: Study, folder: Path, stop: Stop) -> bool:
    """Train the run unless another worker does; returns whether it was ours."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with lock(run.folder / ".lock") as is_ours:
        if not is_ours or run.is_over:
            return False
        check_run(run)
        write_text(run.folder / RUN, run.config.to_yaml())
        start = time.monotonic()
        try:
            if not _train(run, folder, stop):
                return True
            note = f"perplexity {run.result.perplexity}" if run.result else ""
        except Exception as error:  # one that fails, out of memory say, does not stop the others
            write_text(run.folder / FAILED, traceback.format_exc())
            note = f"failed: {' '.join(str(error).split())}"
        if not study.keep_checkpoints:
            for checkpoint in run.folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        line = f"{run.title}: {note} ({time.monotonic() - start:,.0f} s)"
        Console().print(line, markup=False, highlight=False, soft_wrap=True)
    return True


def _train(run: Run, folder: Path, stop: Stop) -> bool:
    from pamm.recipes.tokens import Tokens
    from pamm.recipes.training import train_arm

    tokens, quiet = Tokens.open(folder / DATA), Console(quiet=True)
    return train_arm(run.config, run.arm, run.folder, tokens, quiet, stop)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
