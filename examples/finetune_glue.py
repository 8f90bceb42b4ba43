"""Full fine-tuning of an encoder against PAMM, on tasks in the layout of GLUE, from Python.

    python examples/finetune_glue.py my-encoder my-data    # my-data/mrpc/train.tsv, validation.tsv

Needs pamm-torch[train,plots]. The same as ``pamm finetune glue`` with a file.
"""

import argparse
from pathlib import Path

from rich.console import Console

from pamm import PammConfig
from pamm.recipes.finetuning.glue.finetune import finetune_glue
from pamm.recipes.finetuning.glue.settings import GlueConfig
from pamm.recipes.settings import Arm


def main(
    model: str, data: str, tasks: tuple[str, ...] = ("mrpc",), output: Path = Path("runs")
) -> None:
    config = GlueConfig(
        name="finetune-example",
        model=model,
        data=data,
        tasks=tasks,
        arms=(
            Arm("exact", PammConfig(method="exact")),
            Arm("pamm-1/128", PammConfig("pamm", 1 / 128), lr_factor=4),
        ),
        lrs=(3e-5,),
        factor_task=tasks[0],
        epochs=1,
        seeds=(0,),
    )
    for row in finetune_glue(config, output, Console()):
        print(row["task"], row["arm"], row["metric"], row["mean"], row["held_bytes"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="an encoder: its folder, or its name on the hub")
    parser.add_argument("data", help="a folder with mrpc/train.tsv and mrpc/validation.tsv, or hub")
    options = parser.parse_args()
    main(options.model, options.data)
