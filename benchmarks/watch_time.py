"""What a step takes more while ``pamm.fidelity.watch`` looks on: time and peak memory.

    python benchmarks/watch_time.py benchmarks/results/h200/watch.jsonl        # one minute
    python benchmarks/watch_time.py watch.jsonl --tiny                         # to see it run

Training steps of LLaMA shapes in eager mode, the middle group watched, its numbers read. The two
take turns in one process.
"""

import argparse
from pathlib import Path

import torch

import pamm
from pamm.bench.model import SEQUENCE, SIZES, Steps, build
from pamm.bench.records import Record, append, environment
from pamm.bench.timing import Mark, interleave, peaks

CONFIGS = (pamm.PammConfig(), pamm.PammConfig("pamm", 1 / 512))
REPEATS = 20


def measure(size: str, config: pamm.PammConfig, device: torch.device) -> list[Record]:
    """A record of plain and one of watched steps."""
    shape = SIZES[size]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = build(shape, device, dtype).train()
    pamm.convert(model, config)
    ids = torch.randint(0, 32_000, (shape.batch, SEQUENCE), device=device)
    step = Steps(model, torch.optim.AdamW(model.parameters(), fused=device.type == "cuda"), ids)

    def watched(mark: Mark = lambda phase: None) -> None:
        with pamm.fidelity.watch(model) as seen:
            step(mark)
        seen.metrics()
        mark("metrics")

    repeats = 3 if size == "tiny" else REPEATS
    arms = {"plain": step, "watched": watched}
    memory = {name: dict(peaks(arm, device)) for name, arm in arms.items()}
    medians = interleave(arms, device, repeats, warmup=1)
    return [
        {
            "benchmark": "watch", "model": size, "tokens": shape.tokens, "method": config.method,
            "ratio": config.ratio, "arm": name,
            **{f"{phase}_ms": value for phase, value in medians[name].items()},
            **memory[name], "repeats": repeats, **environment(device),
        }
        for name in arms
    ]  # fmt: skip


def main() -> None:
    """Measure and append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="append records to this file")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see it run")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for size in ("tiny",) if args.tiny else ("60M", "350M", "1B"):
        for config in CONFIGS:
            records = measure(size, config, device)
            append(args.results, records)
            plain, watched = (record["total_ms"] for record in records)
            print(f"{size} {config.method}: {plain:.1f} ms, watched {watched:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
