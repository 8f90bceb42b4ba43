"""Where the time of method="sampled" goes: each part of a weight gradient against the exact one.

    python benchmarks/sampling_time.py > sampling_time.txt

One projection, bf16, microseconds, medians. Sizes are part of the draw; the sum is draw, rows and
product. X is there already: making it again is the same for ``recompute``.
"""

import statistics
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from pamm.bench.records import environment
from pamm.kernels import sample

SHAPES = {
    "60M": (32_768, 512, 512),
    "350M": (32_768, 1024, 1024),
    "1B": (16_384, 2048, 2048),
    "1B fused": (16_384, 2048, 6144),
    "7B": (16_384, 4096, 4096),
}
RATIOS = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))
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


def parts(x: Tensor, g: Tensor, ratio: Fraction) -> list[float]:
    """Draw, rows, product and their sum."""
    c, offset = int(len(x) * ratio), torch.rand(1, device=x.device, dtype=torch.float64)
    index, weight = sample.draw(g, c, offset)
    x_rows, g_rows = sample.rows(x, g, index, weight)
    times = [
        microseconds(lambda: sample.draw(g, c, offset)),
        microseconds(lambda: sample.rows(x, g, index, weight)),
        microseconds(lambda: g_rows.T @ x_rows),
    ]
    return [*times, sum(times)]


def main() -> None:
    """Print the table."""
    device = torch.device("cuda")
    about = environment(device)
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}")
    titles = ("shape", "share", "draw", "rows", "product", "sum", "exact", "sum / exact")
    print(" ".join(f"{title:>11}" for title in titles))
    for name, (tokens, n, m) in SHAPES.items():
        x = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
        uneven = torch.randn(tokens, 1, device=device).square()
        g = (torch.randn(tokens, m, device=device) * uneven).bfloat16()
        exact = microseconds(lambda x=x, g=g: g.T @ x)
        for ratio in RATIOS:
            made = parts(x, g, ratio)
            numbers = [f"{number:.1f}" for number in (*made, exact)]
            row = (name, str(ratio), *numbers, f"{made[-1] / exact:.3f}")
            print(" ".join(f"{cell:>11}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
