"""``pamm bench``: prints a table, and appends JSON lines to --results."""

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Time exact training against the methods on this machine, interleaved.",
)

_SHAPES, _SIZES = ["4096,512,512"], ["60M"]

Results = Annotated[
    Path | None,
    typer.Option(help="Append the results to this file, as JSON lines.", show_default=False),
]
OpArms = Annotated[
    str,
    typer.Option(
        help="What to compare: exact, pamm, paper (its own operations), subspace, uniform_crs, "
        "compact; methods also with a ratio of their own: subspace:1/8. sampled and recompute need "
        "a norm in front: see bench model."
    ),
]
Arms = Annotated[
    str,
    typer.Option(
        help="What to compare: exact, sampled (pamm.convert's default), recompute, pamm, paper "
        "(its own operations), subspace, uniform_crs, compact; methods also with a ratio, and "
        "sampled with directions: sampled:1/3:64, or not in 8 bits: sampled:1/3:16bit. After a + "
        "that of gate and up: recompute+sampled:1/8:128."
    ),
]
Shapes = Annotated[
    list[str],
    typer.Option(help="TOKENS,IN,OUT of q, of k and of v. May be given several times."),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Layout = Annotated[str, typer.Option(help="separate (q, k, v) or fused (one layer).")]
Ratio = Annotated[str, typer.Option(help="Of pamm and paper: share of tokens kept as generators.")]
Repeats = Annotated[
    int, typer.Option(help="Measurements of each, of which the median counts.", min=1)
]
Device = Annotated[str, typer.Option(help="cuda, cpu, or auto.")]


@app.command()
def op(
    shape: Shapes = _SHAPES,
    ratio: Ratio = "1/128",
    dtype: Dtype = "auto",
    layout: Layout = "separate",
    arms: OpArms = "exact,pamm,paper",
    repeats: Repeats = 20,
    device: Device = "auto",
    results: Results = None,
) -> None:
    """Forward and backward of one attention block's q, k and v, and the bytes held between.

    Of methods that keep something of X. sampled, which pamm.convert takes by default, and recompute
    make X again from the norm in front, and are timed in whole steps: pamm bench model.
    """
    from pamm.bench.op import Shape, bench_op
    from pamm.bench.table import op_table
    from pamm.config import PammConfig

    where, config = _device(device), PammConfig("pamm", ratio)  # type: ignore[arg-type]
    shapes = [Shape(*_numbers(text), layout=layout) for text in shape]
    kind = _dtype(dtype, where)
    for each in shapes:
        with _progress(each.name, 5 + repeats) as advance:
            records = bench_op(each, config, where, kind, _names(arms), repeats, advance)
        _finish(op_table(records), records, results)


@app.command()
def model(
    size: Annotated[list[str], typer.Option("--model", help="60M, 350M, 1B, 7B or tiny.")] = _SIZES,
    ratio: Ratio = "1/512",
    compiled: Annotated[
        bool, typer.Option("--compile/--eager", help="Under torch.compile or not.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(help="Fewer layers than the model has.", min=1, show_default=False)
    ] = None,
    arms: Arms = "exact,sampled,pamm,paper",
    repeats: Repeats = 10,
    device: Device = "auto",
    results: Results = None,
) -> None:
    """Whole training steps of a LLaMA shape: forward, backward, optimizer, tokens/s, peaks."""
    from pamm.bench.model import bench_model
    from pamm.bench.table import model_table
    from pamm.config import PammConfig
    from pamm.extras import require

    require("train", "transformers")
    where, config, names = _device(device), PammConfig("pamm", ratio), _names(arms)  # type: ignore[arg-type]
    for each in size:
        with _progress(each, len(names) + 2 + repeats) as advance:
            records = bench_model(
                each, config, where, names, repeats, compiled, layers, between=advance
            )
        _finish(model_table(records), records, results)


@app.command()
def breakdown(
    size: Annotated[str, typer.Option("--model", help="60M, 350M, 1B, 7B or tiny.")] = "1B",
    ratio: Ratio = "1/512",
    layers: Annotated[
        int | None, typer.Option(help="Fewer layers than the model has.", min=1, show_default=False)
    ] = None,
    arm: Annotated[str, typer.Option(help="pamm or paper.")] = "pamm",
    repeats: Repeats = 5,
    device: Device = "auto",
    results: Results = None,
) -> None:
    """The paper's tables of where time goes: ms, share of the iteration and of the pass."""
    from pamm.bench.breakdown import bench_breakdown
    from pamm.bench.table import breakdown_table
    from pamm.config import PammConfig
    from pamm.extras import require

    require("train", "transformers")
    config = PammConfig("pamm", ratio)  # type: ignore[arg-type]
    with _progress(size, 2 + repeats) as advance:
        records = bench_breakdown(size, config, _device(device), arm, repeats, layers, advance)
    _finish(breakdown_table(records), records, results)


@app.command()
def tune(
    shape: Shapes = _SHAPES,
    ratio: Ratio = "1/512",
    dtype: Dtype = "auto",
    layout: Layout = "separate",
) -> None:
    """Time a few tiles for each kernel on this GPU and keep the best on disk: seconds a shape.

    Later runs of any program on this machine use them. Without it, tiles that suit an H200 serve.
    """
    from pamm.bench.op import Shape
    from pamm.bench.table import tune_table
    from pamm.bench.tune import tune as tune_shape
    from pamm.config import PammConfig

    device = _device("cuda")
    from pamm.kernels.tiles import cache_file

    config, kind = PammConfig("pamm", ratio), _dtype(dtype, device)  # type: ignore[arg-type]
    for text in shape:
        each = Shape(*_numbers(text), layout=layout)
        with _progress(each.name, 3) as advance:
            records = tune_shape(each, config, device, kind, advance)
        _finish(tune_table(each.name, records), records, None)
    typer.echo(f"written to {cache_file()}")


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder of results.")] = Path(
        "benchmarks/results"
    ),
    output: Annotated[Path, typer.Option(help="Folder of the page and the pictures.")] = Path(
        "docs"
    ),
) -> None:
    """Turn results into the README's table, a page and a plot."""
    from pamm.bench.report import write_report
    from pamm.extras import require

    require("plots", "matplotlib")
    for path in write_report(results, output):
        typer.echo(path)


def _numbers(text: str) -> tuple[int, int, int]:
    from pamm.errors import PammError

    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise PammError(f"--shape is {text!r}; write TOKENS,IN,OUT, such as 4096,512,512.")
    tokens, n, m = map(int, parts)
    return tokens, n, m


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _device(name: str) -> Any:
    import torch

    from pamm.errors import PammError

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cuda", "cpu"):
        raise PammError(f"--device is {name!r}; choose cuda, cpu or auto.")
    if name == "cuda" and not torch.cuda.is_available():
        raise PammError("this is to run on cuda, but torch finds no GPU.")
    return torch.device(name)


def _dtype(name: str, device: Any) -> Any:
    import torch

    from pamm.errors import PammError

    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in ("float32", "bfloat16", "float16"):
        raise PammError(f"--dtype is {name!r}; choose float32, bfloat16, float16 or auto.")
    return getattr(torch, name)


def _progress(title: str, total: int) -> Any:
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def shown() -> Any:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(title, total=total)
            yield lambda: progress.advance(task)

    return shown()


def _finish(table: Any, records: list[dict[str, Any]], results: Path | None) -> None:
    from rich.console import Console

    from pamm.bench.records import append

    Console().print(table)
    if results is not None:
        append(results, records)
