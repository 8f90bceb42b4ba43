"""Sizes of tiles and how work is split: every choice that is about speed and not about results.

Each kernel has a few tiles to choose from. The first was the best or near it in a sweep on one
H200 (benchmarks/results/h200/tiles.txt) and serves until ``pamm bench tune`` has timed them on the
GPU at hand, which writes its choices to ``cache_file()``.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from pamm.errors import PammError

Tile = dict[str, int]
DoesNotFit = triton.runtime.errors.OutOfResources

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


def _assign(k: int, dtype: torch.dtype) -> list[Tile]:
    block_k = min(256, max(16, power_of_2(k)))
    if dtype == torch.float32:
        return [
            _tile(BLOCK_T=rows, BLOCK_K=min(64, block_k), BLOCK_N=32, warps=4, stages=2)
            for rows in (64, 32)
        ]
    if block_k == 256:
        return [
            _tile(BLOCK_T=128, BLOCK_K=256, BLOCK_N=32, warps=8, stages=4),
            _tile(BLOCK_T=64, BLOCK_K=256, BLOCK_N=64, warps=8, stages=3),
            _tile(BLOCK_T=128, BLOCK_K=128, BLOCK_N=64, warps=8, stages=3),
        ]
    if block_k == 128:
        return [
            _tile(BLOCK_T=128, BLOCK_K=128, BLOCK_N=64, warps=8, stages=3),
            _tile(BLOCK_T=64, BLOCK_K=128, BLOCK_N=64, warps=4, stages=3),
        ]
    wide = _tile(BLOCK_T=64, BLOCK_K=block_k, BLOCK_N=128, warps=4, stages=3)
    high = _tile(BLOCK_T=128, BLOCK_K=block_k, BLOCK_N=64, warps=4, stages=3)
    return [high, wide] if block_k == 64 else [wide, high]


def _segment_sum(k: int, dtype: torch.dtype) -> list[Tile]:
    block_k = min(SORTED_ABOVE, max(16, power_of_2(k)))
    if dtype == torch.float32:
        return [_tile(BLOCK_T=32, BLOCK_M=64, BLOCK_K=min(64, block_k), warps=4, stages=2)]
    warps = 4 if block_k <= 32 else 8
    return [
        _tile(BLOCK_T=128, BLOCK_M=128, BLOCK_K=block_k, warps=warps, stages=3),
        _tile(BLOCK_T=64, BLOCK_M=128, BLOCK_K=block_k, warps=4, stages=4),
        _tile(BLOCK_T=64, BLOCK_M=256, BLOCK_K=block_k, warps=8, stages=3),
    ]


def _expand(k: int, dtype: torch.dtype) -> list[Tile]:
    del dtype
    wide = {"AT_ONCE": 8} | _tile(BLOCK_M=16, BLOCK_N=512, BLOCK_K=64, warps=8, stages=2)
    narrow = {"AT_ONCE": 4} | _tile(BLOCK_M=32, BLOCK_N=512, BLOCK_K=32, warps=4, stages=2)
    return [wide, narrow] if k > 32 else [narrow, wide]


def _sorted_sum(k: int, dtype: torch.dtype) -> list[Tile]:
    del k
    if dtype == torch.float32:
        return [_tile(BLOCK_T=32, BLOCK_M=64, WINDOW=16, warps=4, stages=2)]
    return [
        _tile(BLOCK_T=128, BLOCK_M=256, WINDOW=16, warps=4, stages=2),
        _tile(BLOCK_T=64, BLOCK_M=128, WINDOW=16, warps=4, stages=2),
    ]


def _sorted_expand(k: int, dtype: torch.dtype) -> list[Tile]:
    del k, dtype
    return [
        _tile(BLOCK_M=32, BLOCK_N=128, BLOCK_K=64, warps=8, stages=2),
        _tile(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, warps=8, stages=2),
    ]


CANDIDATES: dict[str, Callable[[int, torch.dtype], list[Tile]]] = {
    "assign": _assign,
    "segment_sum": _segment_sum,
    "expand": _expand,
    "sorted_sum": _sorted_sum,
    "sorted_expand": _sorted_expand,
}
"""For each kernel, the tiles to choose from for (k, dtype); the first where nothing was timed."""


@functools.cache
def tile(kernel: str, k: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The tile of a kernel: what was tuned on this GPU, or the first candidate."""
    return dict(chosen(device).get(key(kernel, k, dtype)) or CANDIDATES[kernel](k, dtype)[0])


def key(kernel: str, k: int, dtype: torch.dtype) -> str:
    """Under which a choice is kept: all k up to the same power of two share it."""
    return f"{kernel} k={power_of_2(k)} {str(dtype).removeprefix('torch.')}"


@functools.cache
def chosen(device: torch.device) -> dict[str, Tile]:
    """The choices for this GPU and Triton; changed in place while tuning."""
    path = cache_file()
    if device.type != "cuda" or not path.exists():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8")).get(gpu(device), {})
        return {str(name): {str(k): int(v) for k, v in t.items()} for name, t in known.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise PammError(f"{path} holds no tiles ({error}); delete it.") from error


def gpu(device: torch.device) -> str:
    """What a choice of tiles is good for."""
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}"


def cache_file() -> Path:
    """``$XDG_CACHE_HOME/pamm/tiles.json``, in ``~/.cache`` by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pamm" / "tiles.json"


def chunk_size(tokens: int) -> int:
    """Sorted tokens that one program sums up; at most 128 chunks."""
    return max(256, power_of_2(ceil_div(tokens, 128)))


def splits(tokens: int, m: int, k: int, sizes: Tile, device: torch.device) -> tuple[int, int]:
    """Into how many parts the tokens are split, and the tokens of each.

    As many programs as run at the same time, but no more than 64 parts: each is read again to be
    added up.
    """
    at_once = (3 if sizes["BLOCK_K"] <= 32 else 2) * multiprocessors(device)
    tiles = ceil_div(m, sizes["BLOCK_M"]) * ceil_div(k, sizes["BLOCK_K"])
    parts = min(64, at_once // tiles, ceil_div(tokens, sizes["BLOCK_T"]))
    parts = max(1, parts)
    each = ceil_div(ceil_div(tokens, parts), sizes["BLOCK_T"]) * sizes["BLOCK_T"]
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


def _tile(warps: int, stages: int, **blocks: int) -> Tile:
    return {**blocks, "num_warps": warps, "num_stages": stages}
