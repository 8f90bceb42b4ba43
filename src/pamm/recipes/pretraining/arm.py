"""One arm of a run, in a process of its own so that its peak of memory is its own.

    python -m pamm.recipes.pretraining.arm RUN_FOLDER ARM_FOLDER

Goes on from the arm's last checkpoint if there is one. Exit codes: 0 done, 2 refused, 130 stopped
with a checkpoint.
"""

import sys
from pathlib import Path

from rich.console import Console

from pamm.errors import PammError
from pamm.recipes.console import show_error
from pamm.recipes.files import CONFIG
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.stop import Stop


def main(run_folder: Path, arm_folder: str) -> int:
    """Train the arm; returns the exit code."""
    stop = Stop()
    stop.listen()  # before the imports below, which take seconds
    try:
        from pamm.recipes.pretraining.tokens import Tokens
        from pamm.recipes.pretraining.training import train_arm

        config = PretrainConfig.load(run_folder / CONFIG)
        arm = next(arm for arm in config.arms if arm.folder == arm_folder)
        finished = train_arm(
            config, arm, run_folder / arm.folder, Tokens.open(run_folder), Console(), stop
        )
    except PammError as error:
        show_error(error)
        return 2
    return 0 if finished else 130


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
