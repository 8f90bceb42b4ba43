"""A worker of a fine-tuning on GLUE: takes one open run after the other.

    python -m pamm.recipes.glue_worker FOLDER

Exit codes: 0 done, 2 refused, 130 stopped with a checkpoint.
"""

import sys
from pathlib import Path

from pamm.errors import PammError
from pamm.recipes.console import show_error
from pamm.recipes.finetune_settings import GlueConfig
from pamm.recipes.glue_plan import GlueRun, Plan
from pamm.recipes.stop import Stop
from pamm.recipes.worker import work_off


def main(folder: Path) -> int:
    """Work; returns the exit code."""
    stop = Stop()
    stop.listen()
    try:
        config = GlueConfig.load(folder / "config.yaml")

        def train(run: GlueRun) -> bool:
            from pamm.recipes.glue_training import train_run

            return train_run(config, run, stop)

        return work_off(Plan(config, folder).to_do, lambda run: None, train, stop)
    except PammError as error:
        show_error(error)
        return 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
