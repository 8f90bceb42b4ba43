"""``pamm finetune``: the paper's fine-tunings, from the command line. Slow imports are inside."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

Output = Annotated[Path, typer.Option(help="Folder of all runs.", metavar="FOLDER")]
Workers = Annotated[
    int | None, typer.Option(help="Trainings at a time; one on each GPU by default.", min=1)
]

app = typer.Typer(no_args_is_help=True, help="Fine-tune a model with and without PAMM.")


@app.callback()
def _group() -> None:
    """Fine-tune a model with and without PAMM."""


@app.command()
def glue(
    config: Annotated[
        str, typer.Option(help="YAML or JSON file, or paper-glue.", metavar="FILE")
    ] = "paper-glue",
    model: Annotated[
        str | None, typer.Option(help="Of an encoder: name on the hub, or folder.", metavar="NAME")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder of TASK/train.tsv, or hub.", metavar="FOLDER")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be given several times.")
    ] = None,
    output: Output = Path("runs"),
    workers: Workers = None,
) -> None:
    """Full fine-tuning against PAMM on the tasks of GLUE, tuned alike, with several seeds.

    Without --config it is the paper's: RoBERTa-base, all tasks. Ctrl-C stops it with checkpoints;
    the same command goes on. A file of your own:

    \b
    name: first
    model: my-encoder                # a folder or a name on the hub
    data: my-glue                    # or: hub
    tasks:                           # of GLUE
      - mrpc
      - cola
    arms:
      exact: {method: exact}
      pamm-1/128: {method: pamm, ratio: 1/128}
    factor_task: mrpc                # on which the factor of q, k and v is chosen
    epochs: 3
    seeds: [0, 1, 2]
    """
    from pamm.recipes.finetuning.glue.finetune import finetune_glue
    from pamm.recipes.finetuning.glue.settings import GlueConfig

    given: dict[str, Any] = {"model": model, "data": data, "tasks": tuple(task or ()) or None}
    chosen = {key: value for key, value in given.items() if value is not None}
    made = dataclasses.replace(GlueConfig.load(config), **chosen)
    finetune_glue(made, output, Console(), workers)


@app.command()
def vlm(
    config: Annotated[
        str, typer.Option(help="YAML or JSON file, paper-vlm or small-vlm.", metavar="FILE")
    ] = "paper-vlm",
    model: Annotated[
        str | None, typer.Option(help="Name on the hub, folder, or small-pixtral.", metavar="NAME")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder of CLASS/*.jpg, or drawn.", metavar="FOLDER")
    ] = None,
    output: Output = Path("runs"),
    workers: Workers = None,
) -> None:
    """LoRA (or full fine-tuning) against PAMM on a model of images and text, with several seeds.

    Images of a folder for each class become a question that lists the classes; scored by F1.
    Without --config it is the paper's: Pixtral-12B on AID. `--config small-vlm` needs no download:
    a small Pixtral on textures that are drawn. Ctrl-C stops it with checkpoints; the same command
    goes on. A file of your own:

    \b
    name: first
    model: my-model                  # a folder or a name on the hub
    data: my-images                  # CLASS/*.jpg, or train/CLASS and validation/CLASS
    image_size: 224
    lora: {r: 16, lora_alpha: 16}    # leave it out to train all weights
    arms:
      lora: {method: exact}
      lora+pamm: {method: pamm, ratio: 1/512, vision: {ratio: 1/128}}
    lrs: [0.0001]
    batch_size: 4
    """
    from pamm.recipes.finetuning.vlm.finetune import finetune_vlm
    from pamm.recipes.finetuning.vlm.settings import VlmConfig

    given: dict[str, Any] = {"model": model, "data": data}
    chosen = {key: value for key, value in given.items() if value is not None}
    made = dataclasses.replace(VlmConfig.load(config), **chosen)
    finetune_vlm(made, output, Console(), workers)
