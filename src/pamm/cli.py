"""The command line. Thin; slow imports are inside commands."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from pamm.bench import cli as bench
from pamm.errors import ArmFailedError, PammError
from pamm.recipes.console import show_error
from pamm.recipes.finetuning import command as finetune
from pamm.recipes.finetuning.command import Output, Workers

_TRAINING = {"demo", "pretrain", "ablate", "finetune"}
"""Commands that go on where they were stopped."""


class _Group(TyperGroup):
    """Turns what users can meet into a message and an exit code; for all commands below it."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """With paragraphs of its help as wide as the terminal, not as the source."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            paragraphs = command.help.split("\n\n")
            command.help = "\n\n".join(
                each if each.startswith("\b") else " ".join(each.split()) for each in paragraphs
            )
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PammError as error:
            show_error(error)
            raise typer.Exit(2) from error
        except ArmFailedError as error:
            show_error(error)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            is_training = not _TRAINING.isdisjoint(
                [*ctx.command_path.split(), ctx.invoked_subcommand]
            )
            notice = "stopped" + "; the same command goes on from here" * is_training
            Console(stderr=True).print(notice, style="yellow")
            raise typer.Exit(130) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train transformers without keeping the input of attention's q, k and v projections.",
)

app.add_typer(bench.app, name="bench", cls=_Group)
app.add_typer(finetune.app, name="finetune", cls=_Group)


@app.command()
def demo(
    output: Output = Path("runs"),
    name: Annotated[str, typer.Option(help="Name of the run; its folder in --output.")] = "demo",
) -> None:
    """Compare exact training, the paper's PAMM and Uniform-CRS here, in a few minutes.

    Trains a small LLaMA on Python's own documentation, once for each method, and ends with a table
    and a report with pictures. Ctrl-C stops it with a checkpoint; the same command goes on.
    pamm.convert's default, sampled, is not among them: pretrain compares any methods.
    """
    from pamm.recipes.pretraining.demo import demo

    demo(name, output, Console())


@app.command()
def pretrain(
    config: Annotated[
        Path,
        typer.Option(
            help="YAML or JSON file of the run, or the name of one of the paper's.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    output: Output = Path("runs"),
) -> None:
    """The same comparison on your text, with your model and your arms.

    Ctrl-C stops it with a checkpoint; the same command goes on. Runs of the paper come with the
    package: paper-60m, paper-350m, paper-1b, paper-7b. On several GPUs:
    torchrun --nproc-per-node 8 -m pamm pretrain --config paper-7b. A file to begin with:

    \b
    name: first
    text: my-text                    # txt, jsonl, jsonl.xz, parquet; files or folders
    model: {hidden_size: 512, intermediate_size: 1376, num_hidden_layers: 8,
            num_attention_heads: 8}
    arms:
      exact: {method: exact}
      pamm-1/128: {method: pamm, ratio: 1/128}
    batch_size: 32                   # sequences in one forward pass
    sequence_length: 256
    steps: 2000
    lr: 0.002
    """
    from pamm.recipes.pretraining.pretrain import pretrain
    from pamm.recipes.pretraining.settings import PretrainConfig

    pretrain(PretrainConfig.load(config), output, Console())


Model = Annotated[
    str, typer.Argument(help="A name on the hub, a folder or a config.json.", metavar="MODEL")
]
Batch = Annotated[int, typer.Option(help="Sequences in one forward pass of one device.")]
Seq = Annotated[int, typer.Option(help="Tokens in a sequence; images have their own size.")]
Dtype = Annotated[
    str, typer.Option(help="bf16, fp32, or bf16-amp and fp16-amp: fp32 weights under autocast.")
]
Targets = Annotated[
    list[str],
    typer.Option("--target", help="attention (q, k, v) or mlp (gate, up); repeat for both."),
]
Widen = Annotated[
    bool, typer.Option("--widen", help="Convert all linear layers that read X, an MLP's too.")
]
Method = Annotated[
    str | None,
    typer.Option(
        help="sampled, recompute, subspace, pamm, uniform_crs, compact or exact; pamm.convert's "
        "default, sampled 2/3, if left out.",
        show_default=False,
    ),
]
Ratio = Annotated[
    str | None,
    typer.Option(
        help="Of the method: the share of tokens drawn (sampled) or kept (pamm, uniform_crs), or "
        "of features (subspace, compact), such as 1/512; the method's own if left out.",
        show_default=False,
    ),
]
Directions = Annotated[
    int | None,
    typer.Option(
        help="Of sampled: directions of X that enter the gradient whole; none if left out.",
        show_default=False,
    ),
]


@app.command()
def inspect(
    model: Model,
    batch: Batch = 1,
    seq: Seq = 2048,
    dtype: Dtype = "bf16",
    method: Method = None,
    ratio: Ratio = None,
    directions: Directions = None,
    target: Targets = ["attention"],  # noqa: B006
    widen: Widen = False,
) -> None:
    """Is pamm.convert worth it on this model? What it keeps for backward, how much would go.

    Needs the model's configuration alone: no weights, no GPU. A training step, in eager mode, runs
    without values.
    """
    from pamm.analysis.inspect import inspect
    from pamm.config import PammConfig

    config = PammConfig(method, ratio, directions=directions)  # type: ignore[arg-type]
    with Console(stderr=True).status("a training step without weights, in several settings"):
        found = inspect(
            model,
            batch=batch,
            seq=seq,
            dtype=dtype,
            config=config,
            targets=target,
            widen=widen,
        )
    Console().print(found)


@app.command()
def plan(
    model: Model,
    batch: Batch = 1,
    seq: Seq = 2048,
    dtype: Dtype = "bf16",
    method: Method = None,
    ratio: Ratio = None,
    directions: Directions = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Of the device, such as 24GB; the largest batch that fits is found."),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="With full activation checkpointing.")
    ] = False,
    target: Targets = ["attention"],  # noqa: B006
    widen: Widen = False,
) -> None:
    """Does a training step fit on the device? Its memory, exact and converted, the largest batch.

    Needs the model's configuration alone: no weights, no GPU. One device, AdamW, no sharding,
    eager mode. With --memory and --method pamm it chooses pamm's ratio too; for other methods a
    ratio is a matter of quality, and memory has no say (sampled) or little (subspace).
    """
    from pamm.analysis.plan import plan
    from pamm.config import PammConfig

    config = PammConfig(method, ratio, directions=directions)  # type: ignore[arg-type]
    with Console(stderr=True).status("a training step without weights, for several batches"):
        found = plan(
            model,
            batch=batch,
            seq=seq,
            dtype=dtype,
            config=config,
            memory=memory,
            checkpointing=checkpointing,
            targets=target,
            widen=widen,
        )
    Console().print(found)


@app.command()
def ablate(
    study: Annotated[
        Path, typer.Argument(help="YAML or JSON file of the study.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(help="Folder of all studies.", metavar="FOLDER")] = Path(
        "studies"
    ),
    workers: Workers = None,
) -> None:
    """The paper's studies: a grid of trainings, each cell at its best learning rate, with seeds.

    Ctrl-C stops it with checkpoints; the same command goes on. On another machine too if the
    study's folder is there: all of it but checkpoint-*, tensorboard and tokens.bin, which may stay
    behind (tar --exclude). A file to begin with:

    \b
    name: method-60m
    cells:                           # also: shape, tolerance; or cells of your own
      - ratio
      - method
    lrs: [0.001, 0.002, 0.004]
    more_lrs: 2                      # of a cell whose best rate is the least or the largest
    seeds: [0, 1, 2]
    tune_steps: 1000                 # of the trainings that choose the rate
    base:                            # as for pamm pretrain
      text: my-text
      model: llama-60m
      vocabulary: 16384
      batch_size: 128
      steps: 3000
      lr_factor: 0.25
    """
    from pamm.recipes.studies.ablate import ablate
    from pamm.recipes.studies.study import Study

    ablate(Study.load(study), output, Console(), workers)


@app.command()
def analyze(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="Folder of a trained model, or of an analysis.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder of what is written.", metavar="FOLDER")
    ] = Path("analysis"),
    text: Annotated[
        list[str] | None,
        typer.Option(help="Files or folders; else the run's validation text.", show_default=False),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="File or name; else the run's.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Number of tokens to analyze.", min=512)] = 8192,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="Number of a block; else first, middle, last.", show_default=False),
    ] = None,
    draws: Annotated[
        int, typer.Option(help="Random draws that each error is the mean of.", min=2)
    ] = 8,
) -> None:
    """What compression does to a trained model's inputs: error, coverage, PCA, theory.

    Writes analysis.json and, for each chosen block, the pictures of the paper's appendix. Given the
    folder of an analysis, draws its pictures again, there; those of PCA need the model.
    """
    from pamm.recipes.studies.analyze import analyze

    analyze(
        checkpoint,
        output,
        Console(),
        text=text or (),
        tokenizer=tokenizer,
        tokens=tokens,
        layers=layer,
        draws=draws,
    )


@app.command()
def report(
    results: Annotated[
        list[Path], typer.Argument(help="Folders of runs, studies, fine-tunings and analyses.")
    ],
    output: Annotated[
        Path, typer.Option(help="Folder of the page and the pictures.", metavar="FOLDER")
    ] = Path("docs/results"),
) -> None:
    """All results on one page, beside the paper's tables; as HTML, and as Markdown for the docs."""
    from pamm.recipes.report.overview import write_overview

    for path in write_overview(results, output):
        typer.echo(path)


def main() -> None:
    """Run the command line; ends the process with 0, 1 (failed), 2 (refused) or 130 (stopped)."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: stops with a checkpoint
    app()
