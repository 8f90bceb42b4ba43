"""Where the time of method="sampled" goes: each part of a weight gradient against the exact one.

    python benchmarks/sampling_time.py > sampling_time.txt

One projection, bf16, microseconds, medians; drawn rows in 16 bits and in 8. "whole" is what all
tokens have in 64 directions: z = X P, of which a compiled model makes one for q, k and v, or for
gate and up, and z.T @ G. "sizes" are those of G's rows and, for 8 bits, what is largest in those of
X, which a compiled model takes as it makes G and X. "draw" chooses the tokens, "rows" takes theirs.
A share of 1 in 8 bits is the rival: all rows rounded, and no draw. X is there already: making it
again is the same for ``recompute``.
"""

import itertools
import statistics
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from pamm import fp8, sampling
from pamm.bench.records import environment
from pamm.kernels import fp8 as fp8_kernel
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
SHARES = tuple(map(Fraction, ("1", "3/4", "2/3", "1/2", "1/3", "1/4", "1/8")))
DIRECTIONS = (0, 64)
BITS = (16, 8)
PARTS = ("whole", "sizes", "draw", "rows", "product")
TITLES = ("shape", "directions", "share", "bits", *PARTS, "sum", "exact", "sum / exact")
REPEATS = 20


def microseconds(call: Callable[[], object]) -> float:
    """Median on the device, which is kept busy meanwhile so that no launch is waited for."""
    for _ in range(4):
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


def parts(x: Tensor, g: Tensor, k: int, share: Fraction, bits: int) -> list[float]:
    """The time of each of ``PARTS``."""
    c, offset = int(len(x) * share), torch.rand(1, device=x.device, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(x.shape[1], k, device=x.device))[0]
    basis = (basis * sampling.unit(x.shape[1])).to(x.dtype).contiguous()
    whole = sampling.whole(x, basis, g) if k else None
    of_whole = microseconds(lambda: sampling.whole(x, basis, g)) if k else 0.0
    size, most = sampling.sizes(g), fp8.largest(x)
    sizes = microseconds(lambda: sampling.sizes(g))
    if bits == 16:
        index, weight = sample.draw(size, c, offset)
        x_rows, g_rows = sample.rows(x, g, index, weight, whole)
        return [
            of_whole,
            sizes,
            microseconds(lambda: sample.draw(size, c, offset)),
            microseconds(lambda: sample.rows(x, g, index, weight, whole)),
            microseconds(lambda: g_rows.T @ x_rows),
        ]
    index, weight, units = sample.draw_with_units(size, c, offset, most)
    draw = microseconds(lambda: sample.draw_with_units(size, c, offset, most))
    if share == 1:
        index, weight, draw = torch.arange(c, device=x.device), torch.ones_like(weight), 0.0
    rows = fp8_kernel.rows(x, g, index, weight, units, whole)

    def product() -> Tensor:
        made = fp8.product(rows, g.dtype)
        return made if whole is None else made[: g.shape[1]].addmm_(whole.inner.T, basis.T)

    return [
        of_whole,
        sizes + microseconds(lambda: fp8.largest(x)),
        draw,
        microseconds(lambda: fp8_kernel.rows(x, g, index, weight, units, whole)),
        microseconds(product),
    ]


def main() -> None:
    """Print the table."""
    device = torch.device("cuda")
    about = environment(device)
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}")
    print(" ".join(f"{title:>13}" for title in TITLES))
    for name, (tokens, n, m) in SHAPES.items():
        x = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
        uneven = torch.randn(tokens, 1, device=device).square()
        g = (torch.randn(tokens, m, device=device) * uneven).bfloat16()
        exact = microseconds(lambda x=x, g=g: g.T @ x)
        for k, share, bits in itertools.product(DIRECTIONS, SHARES, BITS):
            if share == 1 and (k or bits == 16):
                continue  # the exact product
            made = parts(x, g, k, share, bits)
            numbers = [f"{number:.1f}" for number in (*made, sum(made), exact)]
            row = (name, str(k), str(share), str(bits), *numbers, f"{sum(made) / exact:.3f}")
            print(" ".join(f"{cell:>13}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
