"""Where the product with a one-hot matrix stops beating index_add on the CPU.

    python benchmarks/segment_sum_cpu.py benchmarks/results/segment_sum_cpu.jsonl

The crossing is ``pamm.kernels.plain._ONE_HOT_GENERATORS``.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from pamm.bench.records import append, environment
from pamm.bench.timing import Mark, interleave
from pamm.kernels import plain

CPU = torch.device("cpu")


def measure(tokens: int, m: int, k: int, dtype: torch.dtype) -> dict[str, object]:
    torch.manual_seed(0)
    f = torch.randint(k, (tokens,)).to(torch.int16)
    alpha, b = torch.randn(tokens).to(dtype), torch.randn(tokens, m).to(dtype)

    def with_limit(limit: int) -> Callable[[Mark], None]:
        def run(mark: Mark) -> None:
            plain._ONE_HOT_GENERATORS = limit
            plain.segment_sum(f, alpha, b, k)
            mark("segment sum")

        return run

    arms = {"one_hot_ms": with_limit(k), "index_add_ms": with_limit(0)}
    medians = interleave(arms, CPU, repeats=21, warmup=3)
    return {
        "benchmark": "segment_sum_cpu",
        "tokens": tokens,
        "m": m,
        "k": k,
        "dtype": str(dtype).removeprefix("torch."),
        **{name: phases["total"] for name, phases in medians.items()},
        **environment(CPU),
    }


if __name__ == "__main__":
    records = [
        measure(tokens, m, k, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for tokens, m in ((4096, 512), (16384, 512), (4096, 2048))
        for k in (8, 16, 32, 64, 128)
    ]
    append(Path(sys.argv[1]), records)
    for r in records:
        print(*(r[key] for key in ("dtype", "tokens", "m", "k", "one_hot_ms", "index_add_ms")))
