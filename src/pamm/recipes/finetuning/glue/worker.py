"""A worker of a fine-tuning on GLUE: ``python -m pamm.recipes.finetuning.glue.worker FOLDER``."""

import sys
from pathlib import Path

from pamm.recipes.files import CONFIG
from pamm.recipes.finetuning.glue.finetune import GluePlan
from pamm.recipes.finetuning.glue.settings import GlueConfig
from pamm.recipes.finetuning.plan import FinetuneRun
from pamm.recipes.finetuning.runs import serve
from pamm.recipes.stop import Stop


def main(folder: Path) -> int:
    """Work; returns the exit code."""

    def plan() -> GluePlan:
        return GluePlan(GlueConfig.load(folder / CONFIG), folder)

    def train(run: FinetuneRun, stop: Stop) -> bool:
        from pamm.recipes.finetuning.glue.training import train_run

        return train_run(plan().config, run, stop)

    return serve(plan, train)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
