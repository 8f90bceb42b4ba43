"""Products in 8 bits, with sums in fp32 and in Hopper's fast mode: what is lost, and the time.

    python benchmarks/fp8_sums.py > fp8_sums.txt

First a sum of numbers of one sign, the mean of G.T @ X over the true one, as more tokens are added.
Then microseconds, medians, over the number of drawn tokens: cuBLAS takes multiples of 16, and likes
some more than others.
"""

import functools

import torch
from torch import Tensor

from pamm.bench.records import environment
from sampling_time import microseconds

TOKENS = (1024, 4096, 8192, 16_384, 32_768)
SHAPES = {  # m, n: drawn tokens
    (2048, 2048): (10_240, 10_880, 10_912, 10_928, 10_944, 10_976, 11_008, 11_136, 11_264, 16_384),
    (1024, 1024): (21_840, 21_888, 22_016),
    (5504, 2048): (10_928, 11_008),
    (4096, 4096): (10_928, 11_008),
}
MODES = {"fp32": False, "fast": True}


def multiply(g: Tensor, x: Tensor, fast: bool) -> Tensor:
    one = torch.ones((), device=g.device)
    return torch._scaled_mm(g, x.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def main() -> None:
    made = environment(torch.device("cuda"))
    print(f"{made['device']}, torch {made['torch']}")
    for tokens in TOKENS:
        g, x = (torch.rand(512, tokens, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        truth = g.double() @ x.double().T
        kept = {k: (multiply(g, x, v) / truth).mean().item() for k, v in MODES.items()}
        print(f"sum of {tokens:6,}:", *(f"{mode} {share:.4f}" for mode, share in kept.items()))
    for (m, n), drawn in SHAPES.items():
        for c in drawn:
            g, x = (torch.randn(rows, c, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
            times = {
                k: microseconds(functools.partial(multiply, g, x, v)) for k, v in MODES.items()
            }
            print(f"{m} x {n}, {c:6,}:", *(f"{mode} {us:.1f}" for mode, us in times.items()))


if __name__ == "__main__":
    main()
