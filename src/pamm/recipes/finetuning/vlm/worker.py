"""A worker of a fine-tuning on images: ``python -m pamm.recipes.finetuning.vlm.worker FOLDER``."""

import os
import sys
from pathlib import Path

from pamm.recipes.files import CONFIG
from pamm.recipes.finetuning.runs import serve
from pamm.recipes.finetuning.vlm.finetune import VlmPlan
from pamm.recipes.finetuning.vlm.settings import VlmConfig


def main(folder: Path) -> int:
    """Work; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes that load images fork

    def plan() -> VlmPlan:
        return VlmPlan(VlmConfig.load(folder / CONFIG), folder)

    return serve(plan, lambda run, stop: plan().train(run, stop))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
