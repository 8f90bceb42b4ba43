"""Sizes of tiles and how work is split: every choice that is about speed and not about results.

Measured on one H100 (benchmarks/results); other GPUs get the same numbers.
"""

import functools
import os
from typing import Any

import torch
import triton.language as tl

SORTED_ABOVE = 128
"""Generators from which on sorting the tokens pays (``sorted_sum``)."""


def precision(dtype: torch.dtype) -> str:
    """Of fp32 products: exact, unless the user allows tf32 for torch's own."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 or dtype != torch.float32 else "ieee"


def operand(dtype: torch.dtype) -> tl.dtype:
    """The type in which tiles enter the tensor cores."""
    if dtype == torch.bfloat16 and not interpreted():  # the interpreter multiplies bf16 as integers
        return tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def assign_tile(k: int, dtype: torch.dtype) -> dict[str, Any]:
    """For ``_assign_kernel``."""
    block_k = min(256, max(16, power_of_2(k)))
    if dtype == torch.float32:
        return _tile(BLOCK_T=64, BLOCK_K=min(64, block_k), BLOCK_N=32, warps=4, stages=2)
    if block_k == 256:
        return _tile(BLOCK_T=128, BLOCK_K=256, BLOCK_N=32, warps=8, stages=4)
    if block_k == 128:
        return _tile(BLOCK_T=128, BLOCK_K=128, BLOCK_N=64, warps=8, stages=3)
    return _tile(BLOCK_T=128, BLOCK_K=block_k, BLOCK_N=128, warps=8, stages=4)


def segment_tile(k: int, dtype: torch.dtype) -> dict[str, Any]:
    """For ``_segment_sum_kernel``."""
    block_k = min(SORTED_ABOVE, max(16, power_of_2(k)))
    if dtype == torch.float32:
        return _tile(BLOCK_T=32, BLOCK_M=64, BLOCK_K=min(64, block_k), warps=4, stages=2)
    warps = 8 if block_k == SORTED_ABOVE else 4
    return _tile(BLOCK_T=128, BLOCK_M=128, BLOCK_K=block_k, warps=warps, stages=3)


def expand_tile(k: int) -> dict[str, Any]:
    """For ``_expand_kernel``."""
    if k > 32:
        return {"AT_ONCE": 8} | _tile(BLOCK_M=16, BLOCK_N=512, BLOCK_K=64, warps=8, stages=2)
    return {"AT_ONCE": 4} | _tile(BLOCK_M=32, BLOCK_N=512, BLOCK_K=32, warps=4, stages=2)


def sorted_tile(m: int, dtype: torch.dtype) -> dict[str, Any]:
    """For ``_sorted_sum_kernel``."""
    del m
    if dtype == torch.float32:
        return _tile(BLOCK_T=32, BLOCK_M=64, WINDOW=16, warps=4, stages=2)
    return _tile(BLOCK_T=64, BLOCK_M=128, WINDOW=16, warps=4, stages=2)


def sorted_expand_tile(k: int) -> dict[str, Any]:
    """For ``_sorted_expand_kernel``."""
    del k
    return _tile(BLOCK_M=32, BLOCK_N=128, BLOCK_K=32, warps=4, stages=2)


def chunk_size(tokens: int) -> int:
    """Sorted tokens that one program sums up; at most 128 chunks."""
    return max(256, power_of_2(ceil_div(tokens, 128)))


def splits(
    tokens: int, m: int, k: int, tile: dict[str, Any], device: torch.device
) -> tuple[int, int]:
    """Into how many parts the tokens are split, and the tokens of each.

    Two programs a multiprocessor, but no more than 32 parts: each is read again to be added up.
    """
    tiles = ceil_div(m, tile["BLOCK_M"]) * ceil_div(k, tile["BLOCK_K"])
    parts = min(32, 2 * multiprocessors(device) // tiles, ceil_div(tokens, tile["BLOCK_T"]))
    parts = max(1, parts)
    each = ceil_div(ceil_div(tokens, parts), tile["BLOCK_T"]) * tile["BLOCK_T"]
    return ceil_div(tokens, each), each


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is n or more."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; a small number in the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tile(warps: int, stages: int, **blocks: int) -> dict[str, Any]:
    return {**blocks, "num_warps": warps, "num_stages": stages}
