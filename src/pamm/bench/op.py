"""``pamm bench op``: the projections of one attention block, forward and backward."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from pamm.analysis.memory import saved_bytes
from pamm.bench.arms import ARMS, make_arms, place
from pamm.bench.records import Record, environment
from pamm.bench.timing import Mark, interleave
from pamm.config import PammConfig
from pamm.errors import PammError

LAYOUTS = ("separate", "fused")
METHODS = ("exact", "pamm", "paper", "subspace", "uniform_crs", "compact")
"""What can be timed here. The others need a norm in front that makes X again."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Projections of one block: ``tokens`` x ``n`` -> three times ``m``.

    ``layout`` is ``"separate"`` (q, k and v are three layers, as in most models) or ``"fused"``
    (one layer of three times the width, as in some).
    """

    tokens: int
    n: int
    m: int
    layout: str = "separate"

    def __post_init__(self) -> None:
        if min(self.tokens, self.n, self.m) < 1:
            raise PammError(f"shape is {self}; tokens, n and m are whole numbers above 0.")
        if self.layout not in LAYOUTS:
            raise PammError(f"layout is {self.layout!r}; choose {' or '.join(LAYOUTS)}.")

    @property
    def name(self) -> str:
        """For tables."""
        outputs = f"3 x {self.m}" if self.layout == "separate" else f"{3 * self.m}"
        return f"{self.tokens:,} x {self.n} -> {outputs}"


def block(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The projections, named so that ``convert`` finds them."""
    if shape.layout == "fused":
        layers = {"qkv_proj": nn.Linear(shape.n, 3 * shape.m, bias=False)}
    else:
        layers = {f"{name}_proj": nn.Linear(shape.n, shape.m, bias=False) for name in "qkv"}
    return nn.ModuleDict(layers).to(device, dtype)


def bench_op(
    shape: Shape,
    config: PammConfig,
    device: torch.device,
    dtype: torch.dtype,
    names: tuple[str, ...],
    repeats: int,
    between: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Medians of forward, backward and total of every arm, and the bytes it holds between them.

    On CUDA the passes are captured in graphs and replayed: the device's time is measured, and not
    the host's, which ``host_ms`` tells, and which a training step hides behind the device's or
    does not. (The paper's operations cannot be captured.)

    Raises:
        PammError: if an arm needs more than the projections.
    """
    _check(names)
    torch.manual_seed(0)
    model = block(shape, device, dtype)
    x = torch.randn(shape.tokens, shape.n, device=device, dtype=dtype, requires_grad=True)
    grads = [
        torch.randn(shape.tokens, layer.out_features, device=device, dtype=dtype)  # type: ignore[arg-type]
        for layer in model.children()
    ]

    arms = make_arms(model, config, names)
    runs = {name: _Run(arm, x, grads) for name, arm in arms.items()}
    host = {name: _host_ms(run, device) for name, run in runs.items()}
    timed = {name: _timed(name, run, device) for name, run in runs.items()}
    medians = interleave(timed, device, repeats, 5, between)
    return [
        {
            "benchmark": "op",
            **dataclasses.asdict(shape),
            "k": config.generators(shape.tokens),
            "dtype": str(dtype).removeprefix("torch."),
            "arm": name,
            **_passes(medians[name]),
            "host_ms": host[name],
            "held_bytes": saved_bytes(
                arm,
                {"": [layer for layer, _ in arm.named_children()]},
                lambda arm=arm: [layer(x) for layer in arm.children()],
            )[""],
            "repeats": repeats,
            **environment(device),
        }
        for name, arm in arms.items()
    ]


def _check(names: tuple[str, ...]) -> None:
    """Raise unless all arms can be timed on projections alone."""
    refused = [
        name for name in names if name.split(":")[0] not in METHODS or place(name) == len(ARMS)
    ]
    if names and not refused:
        return
    message = f"arms are {', '.join(names) or 'none'}; choose from {', '.join(METHODS)}."
    if models := [name for name in refused if place(name) < len(ARMS)]:
        arms = ",".join(dict.fromkeys(("exact", *models)))
        message += (
            f" {' and '.join(models)} would need a norm that makes X again, or gate and up, which "
            f"whole training steps have: pamm bench model --arms {arms}."
        )
    raise PammError(message)


class _Run:
    """The passes of one arm, on fixed inputs and gradients."""

    def __init__(self, arm: nn.Module, x: torch.Tensor, grads: list[torch.Tensor]) -> None:
        self._arm, self._x, self._grads = arm, x, grads

    def forward(self) -> list[torch.Tensor]:
        """Outputs, with their graph."""
        return [layer(self._x) for layer in self._arm.children()]

    def __call__(self, mark: Mark = lambda phase: None) -> None:
        """Forward and backward, into fresh gradients."""
        self._arm.zero_grad()
        self._x.grad = None
        outputs = self.forward()
        mark("forward")
        torch.autograd.backward(outputs, self._grads)
        mark("backward")


def _timed(name: str, run: _Run, device: torch.device) -> Callable[[Mark], None]:
    if device.type != "cuda" or name == "paper":
        return run
    forward, both = captured(run.forward), captured(run)

    def replay(mark: Mark) -> None:
        forward()
        mark("forward")
        both()
        mark("both")

    return replay


def _passes(medians: dict[str, float]) -> dict[str, float]:
    """Forward, backward and total; of replays, backward is what both take beyond forward."""
    forward = medians["forward"]
    backward = medians["both"] - forward if "both" in medians else medians["backward"]
    return {"forward_ms": forward, "backward_ms": backward, "total_ms": forward + backward}


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """``work`` as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile and allocate before capturing
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _host_ms(run: _Run, device: torch.device) -> float:
    """What it takes to enqueue both passes; off CUDA, to run them."""
    times = []
    for _ in range(7):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)
