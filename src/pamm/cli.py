"""The command line: ``pamm demo`` and others. Thin; slow imports are inside commands."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from pamm.bench import cli as bench
from pamm.errors import ArmFailedError, PammError
from pamm.recipes.console import show_error


class _Group(TyperGroup):
    """Turns what users can meet into a message and an exit code; for all commands below it."""

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
            notice = "stopped; the same command goes on from here"
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

Output = Annotated[Path, typer.Option(help="Folder of all runs.", metavar="FOLDER")]


@app.command()
def demo(
    output: Output = Path("runs"),
    name: Annotated[str, typer.Option(help="Name of the run; its folder in --output.")] = "demo",
) -> None:
    """Compare exact training, PAMM and Uniform-CRS on this machine, in a few minutes.

    Trains a small LLaMA on Python's own documentation, once for each method, and ends with a table
    and a report with pictures. Ctrl-C stops it with a checkpoint; the same command goes on.
    """
    from pamm.recipes.demo import demo

    demo(name, output, Console())


@app.command()
def pretrain(
    config: Annotated[
        Path, typer.Option(help="YAML or JSON file of the run.", metavar="FILE", show_default=False)
    ],
    output: Output = Path("runs"),
) -> None:
    """The same comparison on your text, with your model and your arms.

    Ctrl-C stops it with a checkpoint; the same command goes on. A file to begin with:

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
    from pamm.recipes.pretrain import pretrain
    from pamm.recipes.settings import PretrainConfig

    pretrain(PretrainConfig.load(config), output, Console())


Model = Annotated[
    str, typer.Argument(help="A name on the hub, a folder or a config.json.", metavar="MODEL")
]
Batch = Annotated[int, typer.Option(help="Sequences in one forward pass of one device.")]
Seq = Annotated[int, typer.Option(help="Tokens in a sequence; images have their own size.")]
Dtype = Annotated[
    str, typer.Option(help="bf16, fp32, or bf16-amp and fp16-amp: fp32 weights under autocast.")
]
Ratio = Annotated[str, typer.Option(help="Share of the tokens kept as generators, such as 1/512.")]


@app.command()
def inspect(
    model: Model,
    batch: Batch = 1,
    seq: Seq = 2048,
    dtype: Dtype = "bf16",
    ratio: Ratio = "1/512",
) -> None:
    """Is PAMM worth it on this model? What it keeps for backward, and how much of that would go.

    Needs the model's configuration alone: no weights, no GPU. A training step runs without values.
    """
    from pamm.analysis.inspect import inspect
    from pamm.config import PammConfig

    config = PammConfig(ratio=ratio)  # type: ignore[arg-type]
    with Console(stderr=True).status("a training step without weights, in several settings"):
        found = inspect(model, batch=batch, seq=seq, dtype=dtype, config=config)
    Console().print(found)


@app.command()
def plan(
    model: Model,
    batch: Batch = 1,
    seq: Seq = 2048,
    dtype: Dtype = "bf16",
    ratio: Ratio = "1/512",
    memory: Annotated[
        str | None, typer.Option(help="Of the device, such as 24GB: finds the largest batch.")
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="With full activation checkpointing.")
    ] = False,
) -> None:
    """Does a training step fit on the device? Memory with and without PAMM, the largest batch.

    Needs the model's configuration alone: no weights, no GPU. One device, AdamW, no sharding.
    """
    from pamm.analysis.plan import plan
    from pamm.config import PammConfig

    config = PammConfig(ratio=ratio)  # type: ignore[arg-type]
    with Console(stderr=True).status("a training step without weights, for several batches"):
        found = plan(
            model,
            batch=batch,
            seq=seq,
            dtype=dtype,
            config=config,
            memory=memory,
            checkpointing=checkpointing,
        )
    Console().print(found)


def main() -> None:
    """Run the command line; ends the process with 0, 1 (failed), 2 (refused) or 130 (stopped)."""
    app()
