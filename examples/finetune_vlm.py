"""LoRA on a model of images and text against the same with PAMM, on images by class, from Python.

    python examples/finetune_vlm.py my-model my-images    # my-images/CLASS/*.jpg
    python examples/finetune_vlm.py small-pixtral drawn   # random weights, drawn images

Needs pamm-torch[train,peft,plots]. The same as ``pamm finetune vlm`` with a file.
"""

import argparse
from pathlib import Path

from rich.console import Console

from pamm import PammConfig
from pamm.recipes.finetuning.vlm.finetune import finetune_vlm
from pamm.recipes.finetuning.vlm.settings import VlmArm, VlmConfig


def main(model: str, data: str, output: Path = Path("runs")) -> None:
    config = VlmConfig(
        name="finetune-vlm-example",
        model=model,
        data=data,
        lora={"r": 16, "lora_alpha": 16},
        arms=(
            VlmArm("lora", PammConfig("exact")),
            VlmArm(
                "lora+pamm",
                PammConfig("pamm", 1 / 512),
                vision=PammConfig("pamm", 1 / 128),
            ),
        ),
        batch_size=4,
        seeds=(0,),
    )
    for row in finetune_vlm(config, output, Console()):
        print(row["arm"], "macro F1", row["mean"], row["towers"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="its folder, its name on the hub, or small-pixtral")
    parser.add_argument("data", help="a folder with a folder of images for each class, or drawn")
    options = parser.parse_args()
    main(options.model, options.data)
