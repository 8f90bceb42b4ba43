"""``pamm bench tune``: time a few tiles for each kernel on this GPU, and keep the best on disk."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch

from pamm import ops
from pamm.bench.op import Shape, captured
from pamm.bench.records import Record
from pamm.bench.timing import Mark, interleave
from pamm.config import PammConfig
from pamm.kernels import tiles

REPEATS = 20
"""Measurements of each candidate, of which the median counts."""


def tune(
    shape: Shape,
    config: PammConfig,
    device: torch.device,
    dtype: torch.dtype,
    between: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Choose a tile for every kernel that this shape uses; writes ``tiles.cache_file()``.

    Two to three candidates a kernel, each compiled once: seconds for a shape. The first candidate
    stays unless another is at least 2 % faster.
    """
    k = config.generators(shape.tokens)
    x = torch.randn(shape.tokens, shape.n, device=device, dtype=dtype)
    width = shape.m if shape.layout == "separate" else 3 * shape.m
    grad = torch.randn(shape.tokens, width, device=device, dtype=dtype)
    index = torch.randperm(shape.tokens, device=device)[:k]
    state = ops.compress(x, index, config.tolerance, "triton")

    def compress() -> object:
        return ops.compress(x, index, config.tolerance, "triton")

    def weight_grad() -> object:
        return ops.weight_grad(state, grad, "triton")

    kernels: dict[str, Callable[[], object]] = {"assign": compress}
    pair = ("sorted_sum", "sorted_expand") if k > tiles.SORTED_ABOVE else ("segment_sum", "expand")
    kernels |= dict.fromkeys(pair, weight_grad)
    records = []
    for kernel, work in kernels.items():
        records.append(_tuned(kernel, k, dtype, device, work))
        between()
    _save(device)
    return records


def _tuned(
    kernel: str, k: int, dtype: torch.dtype, device: torch.device, work: Callable[[], object]
) -> dict[str, Any]:
    choices, name = tiles.chosen(device), tiles.key(kernel, k, dtype)
    candidates = tiles.CANDIDATES[kernel](k, dtype)
    replays: dict[str, Callable[[Mark], None]] = {}
    for number, candidate in enumerate(candidates):
        choices[name] = candidate
        tiles.tile.cache_clear()
        with contextlib.suppress(tiles.DoesNotFit):
            replays[str(number)] = _replay(work)
    times = {
        int(number): passes["total"]
        for number, passes in interleave(replays, device, REPEATS, 3).items()
    }
    best = min(times, key=times.__getitem__)
    default = times.get(0, float("inf"))
    if times[best] > 0.98 * default:
        best = 0
    choices[name] = candidates[best]
    tiles.tile.cache_clear()
    return {
        "kernel": name,
        "default_ms": default,
        "best_ms": times[best],
        "tile": choices[name],
    }


def _replay(work: Callable[[], object]) -> Callable[[Mark], None]:
    replay = captured(work)

    def measured(mark: Mark) -> None:
        replay()
        mark("work")

    return measured


def _save(device: torch.device) -> None:
    path = tiles.cache_file()
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[tiles.gpu(device)] = tiles.chosen(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)
