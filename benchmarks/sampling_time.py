"""Where the time of method="sampled" goes: each part of a weight gradient against the exact one.

    python benchmarks/sampling_time.py > sampling_time.txt

One projection, bf16, microseconds, medians. "whole" is what all tokens have in 64 directions:
z = X P, of which a compiled model makes one for q, k and v, or for gate and up, and z.T @ G. "draw"
takes the sizes of G and chooses the tokens, "rows" takes theirs. X is there already: making it
again is the same for ``recompute``.
"""

import itertools
import statistics
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from pamm import sampling
from pamm.bench.records import environment
from pamm.kernels import sample

SHAPES = {
    "60M": (32_768, 512, 512),
    "350M": (32_768, 1024, 1024),
    "1B": (16_384, 2048, 2048),
    "1B fused": (16_384, 2048, 6144),
    "7B": (16_384, 4096, 4096),
    "1B k, 8 heads": (16_384, 2048, 512),  # grouped queries
    "8B k, 8 heads": (16_384, 4096, 1024),
    "350M gate": (32_768, 1024, 2736),
    "1B gate": (16_384, 2048, 5504),  # 5461 in the paper, which a compiler lays in such rows
    "7B gate": (16_384, 4096, 11_008),
}
RATIOS = (Fraction(1, 2), Fraction(1, 3), Fraction(1, 4), Fraction(1, 8))
DIRECTIONS = (0, 64)
TITLES = ("shape", "directions", "share", "whole", "draw", "rows", "product", "sum", "exact")
REPEATS = 30


def microseconds(call: Callable[[], object]) -> float:
    """Median on the device, which is kept busy meanwhile so that no launch is waited for."""
    for _ in range(5):
        call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(300_000)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def parts(x: Tensor, g: Tensor, k: int, ratio: Fraction) -> list[float]:
    """Whole, draw, rows, product and their sum."""
    c, offset = int(len(x) * ratio), torch.rand(1, device=x.device, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(x.shape[1], k, device=x.device))[0]
    basis = (basis * sampling.unit(x.shape[1])).to(x.dtype)
    whole = sampling.whole(x, basis, g) if k else None
    index, weight = sample.draw(sampling.sizes(g), c, offset)
    x_rows, g_rows = sample.rows(x, g, index, weight, whole)
    times = [
        microseconds(lambda: sampling.whole(x, basis, g)) if k else 0.0,
        microseconds(lambda: sample.draw(sampling.sizes(g), c, offset)),
        microseconds(lambda: sample.rows(x, g, index, weight, whole)),
        microseconds(lambda: g_rows.T @ x_rows),
    ]
    return [*times, sum(times)]


def main() -> None:
    """Print the table."""
    device = torch.device("cuda")
    about = environment(device)
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}")
    print(" ".join(f"{title:>13}" for title in (*TITLES, "sum / exact")))
    for name, (tokens, n, m) in SHAPES.items():
        x = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
        uneven = torch.randn(tokens, 1, device=device).square()
        g = (torch.randn(tokens, m, device=device) * uneven).bfloat16()
        exact = microseconds(lambda x=x, g=g: g.T @ x)
        for k, ratio in itertools.product(DIRECTIONS, RATIOS):
            made = parts(x, g, k, ratio)
            numbers = [f"{number:.1f}" for number in (*made, exact)]
            row = (name, str(k), str(ratio), *numbers, f"{made[-1] / exact:.3f}")
            print(" ".join(f"{cell:>13}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
