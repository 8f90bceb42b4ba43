"""``pamm bench op``: the projections of one attention block, forward and backward."""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from pamm.analysis.memory import saved_bytes
from pamm.bench.arms import make_arms
from pamm.bench.records import Record, environment
from pamm.bench.timing import Mark, interleave
from pamm.config import PammConfig
from pamm.errors import PammError

LAYOUTS = ("separate", "fused")


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
    """Medians of forward, backward and total of every arm, and the bytes it holds between them."""
    torch.manual_seed(0)
    model = block(shape, device, dtype)
    x = torch.randn(shape.tokens, shape.n, device=device, dtype=dtype, requires_grad=True)
    grads = [
        torch.randn(shape.tokens, layer.out_features, device=device, dtype=dtype)  # type: ignore[arg-type]
        for layer in model.children()
    ]

    def work(arm: nn.Module) -> Callable[[Mark], None]:
        def run(mark: Mark) -> None:
            arm.zero_grad()
            x.grad = None
            outputs = [layer(x) for layer in arm.children()]
            mark("forward")
            torch.autograd.backward(outputs, grads)
            mark("backward")

        return run

    arms = make_arms(model, config, names)
    medians = interleave(
        {name: work(arm) for name, arm in arms.items()}, device, repeats, 5, between
    )
    return [
        {
            "benchmark": "op",
            **dataclasses.asdict(shape),
            "k": config.generators(shape.tokens),
            "dtype": str(dtype).removeprefix("torch."),
            "arm": name,
            **{f"{phase}_ms": value for phase, value in medians[name].items()},
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
