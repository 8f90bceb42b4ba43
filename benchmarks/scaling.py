"""How tokens/s grow with the number of GPUs: DDP and FSDP2, exact against PAMM 1/512, LLaMA shapes.

    torchrun --standalone --nproc-per-node 4 benchmarks/scaling.py run --results scaling.jsonl
    python benchmarks/scaling.py plot scaling.jsonl scaling.png

Every GPU sees the same batch, however many there are. Weights, gradients and AdamW's state are
bf16; blocks are compiled. Exact training and PAMM take turns in the same processes, each with a
model of its own; medians. On the CPU it is for tests alone: fp32, gloo.
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pamm
from pamm.analysis.plots import COLOURS, new_figure, png
from pamm.bench.model import SEQUENCE, SIZES, Steps, build
from pamm.bench.records import Record, append, environment
from pamm.bench.timing import interleave
from pamm.recipes.pretraining.model import compile_blocks

CONFIG = pamm.PammConfig("pamm", 1 / 512)
WAYS = ("ddp", "fsdp2")
WARMUP = 3  # turns


def shared(model: nn.Module, way: str, device: torch.device) -> nn.Module:
    """The model among all processes: copies of it, or a share of every block's weights each."""
    if way == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def bench(name: str, way: str, device: torch.device, repeats: int, compiled: bool) -> list[Record]:
    """Both arms of one shape; all processes call it alike."""
    size, gpus = SIZES[name], torch.distributed.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = torch.randint(0, 32_000, (size.batch, SEQUENCE), device=device)
    arms = {}
    for arm in ("exact", "pamm"):
        torch.manual_seed(0)
        model = build(size, device, dtype).train()
        if arm == "pamm":
            pamm.convert(model, CONFIG)
        if compiled:
            compile_blocks(model)
        model = shared(model, way, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        arms[arm] = Steps(model, optimizer, ids)
    medians = interleave(arms, device, repeats, WARMUP)
    return [
        {
            "benchmark": "scaling",
            "model": name,
            **dataclasses.asdict(size),
            "sequence": SEQUENCE,
            "way": way,
            "gpus": gpus,
            "arm": arm,
            "k": CONFIG.generators(size.tokens),
            **{f"{phase}_ms": value for phase, value in medians[arm].items()},
            "tokens_per_s": 1e3 * gpus * size.tokens / medians[arm]["total"],
            "dtype": str(dtype).removeprefix("torch."),
            "compiled": compiled,
            "repeats": repeats,
            **environment(device),
        }
        for arm in arms
    ]


def run(names: list[str], repeats: int, compiled: bool, results: Path) -> None:
    """All shapes, both ways, in the processes that torchrun started; the first one writes."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    for name in names:
        for way in WAYS:
            torch.compiler.reset()
            records = bench(name, way, device, repeats, compiled)
            if cuda:
                torch.cuda.empty_cache()
            if torch.distributed.get_rank() == 0:
                append(results, records)
                for record in records:
                    text = "{model} {way}, {gpus} GPUs, {arm}: {tokens_per_s:,.0f} tokens/s"
                    print(text.format(**record), flush=True)
    torch.distributed.destroy_process_group()


def efficiency(records: list[Record], record: Record) -> float | None:
    """Tokens/s over those of as many single GPUs; ``None`` where one GPU was not measured."""
    same = ("model", "way", "arm", "device", "compiled")
    for each in records:
        if each["gpus"] == 1 and all(each[key] == record[key] for key in same):
            return record["tokens_per_s"] / record["gpus"] / each["tokens_per_s"]
    return None


def plot(records: list[Record]) -> bytes:
    """Tokens/s over GPUs for every shape, with the efficiency beside the points."""
    names = list(dict.fromkeys(record["model"] for record in records))
    figure, panels = new_figure(6 * len(names), 4.8, panels=len(names))
    for axes, name in zip([panels] if len(names) == 1 else panels, names, strict=True):
        ours = [record for record in records if record["model"] == name]
        cases = dict.fromkeys((record["way"], record["arm"]) for record in ours)
        counts = sorted({record["gpus"] for record in ours})
        for number, (way, arm) in enumerate(cases):
            points = sorted(
                (r for r in ours if (r["way"], r["arm"]) == (way, arm)), key=lambda r: r["gpus"]
            )
            last = points[-1]
            share = efficiency(records, last)
            label = f"{'DDP' if way == 'ddp' else 'FSDP2'}, {arm}"
            if share is not None and last["gpus"] > 1:
                label += f": {share:.1%} efficient on {last['gpus']}"
            axes.plot(
                [r["gpus"] for r in points],
                [r["tokens_per_s"] / 1e3 for r in points],
                "o-" if arm == "exact" else "s--",
                color=COLOURS[1 + number // 2],
                ms=5,
                label=label,
            )
        one = [r["tokens_per_s"] / 1e3 for r in ours if r["gpus"] == 1 and r["arm"] == "exact"]
        if one:
            axes.plot(counts, [max(one) * count for count in counts], ":", color="grey", lw=1,
                      label="exact on one GPU, times GPUs")  # fmt: skip
        axes.set_xticks(counts)
        axes.set_ylim(0, None)
        axes.set_xlabel("GPUs")
        axes.set_ylabel("tokens/s (thousands)")
        axes.set_title(f"LLaMA {name}, {ours[0]['batch']} x {ours[0]['sequence']} tokens a GPU")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    return png(figure)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--models", nargs="+", default=["350M", "1B"], choices=[*SIZES])
    command.add_argument("--repeats", type=int, default=8)
    command.add_argument("--eager", action="store_true", help="do not compile")
    command.add_argument("--results", type=Path, required=True)
    command = commands.add_parser("plot")
    command.add_argument("results", type=Path)
    command.add_argument("picture", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options.models, options.repeats, not options.eager, options.results)
    else:
        lines = options.results.read_text().splitlines()
        options.picture.write_bytes(plot([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()
