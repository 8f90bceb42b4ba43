"""``pamm bench breakdown``: the paper's tables of where the time of a step goes.

A few steps run under torch's profiler. Every kernel (off CUDA: every operation) that runs inside a
converted projection is counted under the part of the method it belongs to.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from pamm.bench.arms import make_arms
from pamm.bench.model import SEQUENCE, Steps, build, resized
from pamm.bench.records import Record, environment
from pamm.bench.timing import interleave
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.nn import is_pamm

_FORWARD, _BACKWARD = "pamm projection", "CompressedLinearBackward"

# Parts of the method, by a word in the name of the kernel or of an operation around it; the first
# that fits counts.
_PARTS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "pamm": {
        "forward": {
            "draw": ("_draw_kernel", "pamm::draw"),
            "gather": ("_gather_kernel",),
            "similarity + assign": ("_assign_kernel", "pamm::compress"),
            "matmul": ("aten::linear",),
        },
        "backward": {
            "product": ("_expand_kernel",),
            "segment sum": ("pamm::weight_grad",),
            "input grad": ("aten::mm", "aten::matmul"),
        },
    },
    "paper": {
        "forward": {
            "draw": ("aten::randperm",),
            "gather": ("aten::index",),
            "norms": ("aten::linalg_vector_norm", "aten::norm"),
            "matmul": ("aten::linear",),
            "similarity + assign": ("aten::",),
        },
        "backward": {
            "segment sum": ("aten::mul", "aten::index_add", "aten::new_zeros", "aten::unsqueeze"),
            "input grad and product": ("aten::mm", "aten::matmul"),
        },
    },
}


def bench_breakdown(
    size_name: str,
    config: PammConfig,
    device: torch.device,
    arm_name: str,
    repeats: int,
    layers: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Milliseconds of each part, and its share of the iteration and of the forward or backward."""
    if arm_name not in _PARTS:
        raise PammError(f"arm is {arm_name!r}; choose {' or '.join(_PARTS)}.")
    size = resized(size_name, layers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = build(size, device, dtype).train()
    ids = torch.randint(0, 32_000, (size.batch, SEQUENCE), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    arm = make_arms(model, config, (arm_name,))[arm_name]
    step = Steps(arm, optimizer, ids)
    medians = interleave({arm_name: step}, device, repeats, 2, between)[arm_name]

    for layer in arm.modules():
        if is_pamm(layer):
            _mark_forward(layer)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as traced:
        for _ in range(repeats):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    records = []
    for direction, parts in _PARTS[arm_name].items():
        times = _times_ms(traced.events(), direction, parts, repeats)  # type: ignore[arg-type]
        for part, value in {"total": sum(times.values()), **times}.items():
            records.append(
                {
                    "benchmark": "breakdown",
                    "model": size_name,
                    "layers": size.layers,
                    "tokens": size.tokens,
                    "k": config.generators(size.tokens),
                    "arm": arm_name,
                    "pass": direction,
                    "part": part,
                    "ms": value,
                    "share_of_iteration": value / medians["total"],
                    "share_of_pass": value / medians[direction],
                    "iteration_ms": medians["total"],
                    **environment(device),
                }
            )
    return records


def _mark_forward(layer: nn.Module) -> None:
    """Make the layer's forward visible in the profile."""
    plain = layer.forward

    def marked(*args: Any, **kwargs: Any) -> Any:
        with profiler.record_function(_FORWARD):
            return plain(*args, **kwargs)

    layer.forward = marked


def _times_ms(
    events: list[Any], direction: str, parts: dict[str, tuple[str, ...]], steps: int
) -> dict[str, float]:
    """Milliseconds of each part in one step."""
    root = _FORWARD if direction == "forward" else _BACKWARD
    on_device = any(event.kernels for event in events)
    times = dict.fromkeys(parts, 0.0)
    for event in events:
        around = _names_around(event)
        if not any(root in name for name in around):
            continue
        pieces = [(kernel.name, kernel.duration) for kernel in event.kernels]
        for name, microseconds in pieces if on_device else [("", event.self_cpu_time_total)]:
            part = _part(name, around, parts)
            if part:
                times[part] += microseconds / 1e3 / steps
    return times


def _names_around(event: Any) -> list[str]:
    """Of the event and of everything it runs inside."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


def _part(kernel: str, around: list[str], parts: dict[str, tuple[str, ...]]) -> str | None:
    for part, words in parts.items():
        if any(word in name for word in words for name in (kernel, *around)):
            return part
    return None
