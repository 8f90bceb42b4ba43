"""Learning rates for the demo: its model, text and steps, at several rates, exact and PAMM.

    python benchmarks/demo_learning_rate.py [RUNS_FOLDER]

Rewrites results/demo_learning_rate.jsonl, one line a training. Takes about ten minutes on two
cores; can be stopped and goes on, like every run.
"""

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console

from pamm.config import PammConfig
from pamm.recipes.pretraining.demo import demo_config, write_demo_text
from pamm.recipes.pretraining.pretrain import open_run, train_arms
from pamm.recipes.settings import Arm

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
METHODS = {"exact": PammConfig(method="exact"), "pamm-1/128": PammConfig("pamm", 1 / 128)}
RESULTS = Path(__file__).parent / "results" / "demo_learning_rate.jsonl"
COLUMNS = ("name", "lr", "perplexity", "validation_loss", "steps", "tokens", "device", "versions")


def main() -> None:
    """Train all arms and write the results."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs") / "demo-learning-rate"
    text = folder / "text.jsonl"
    arms = [
        Arm(f"{name}@{rate:g}", config, lr=rate)
        for rate in RATES
        for name, config in METHODS.items()
    ]
    config = dataclasses.replace(demo_config(folder.name, text), arms=tuple(arms))
    console = Console()
    with open_run(config, folder):
        write_demo_text(text, console)
        results = train_arms(config, folder, console)
    lines = [{key: getattr(result, key) for key in COLUMNS} for result in results]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
