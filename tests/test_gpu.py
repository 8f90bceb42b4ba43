"""What only a real GPU can show: it never waits, launches little, addresses beyond 2^31."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import pamm
from pamm import ops, sampling
from pamm.bench.op import Shape
from pamm.bench.tune import tune
from pamm.kernels import tiles
from tests.helpers import NAMES
from tests.tolerances import assert_implementation_error, relative_error

pytestmark = pytest.mark.gpu

TOKENS, FEATURES = 4096, 256
PAMM = pamm.PammConfig("pamm", 1 / 128)
AGAIN = (
    pamm.PammConfig("recompute"),
    pamm.PammConfig("sampled", 1 / 2),
    pamm.PammConfig("sampled", 1 / 4, directions=32),
)
LAUNCHES = {
    # Forward, once for q, k and v: draw, gather, assign. Backward, for each of them, in place of
    # exact's product: segment sum, expansion.
    "pamm": (3, 1),
    # Draw, and two for a number of it; sizes, what is largest in X, draw and rows before a product.
    "sampled": (3, 4),
    "recompute": (0, 0),
}


class Projections(nn.Module):
    """q, k and v behind a norm."""

    def __init__(self, config: pamm.PammConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(FEATURES)
        for name in NAMES:
            setattr(self, name, nn.Linear(FEATURES, FEATURES, bias=False))
        self.to("cuda", torch.bfloat16)
        if config.method != "exact":
            pamm.convert(self, config, example=x())

    def forward(self, h: torch.Tensor) -> list[torch.Tensor]:
        x = self.norm(h)
        return [getattr(self, name)(x) for name in NAMES]


def x() -> torch.Tensor:
    return torch.randn(TOKENS, FEATURES, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.fixture
def _waiting_is_allowed_afterwards() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("config", "compiled"),
    [
        *(
            (pamm.PammConfig("pamm", r, t), False)
            for r in (1 / 128, 1 / 16)
            for t in (None, 0.5, 0)
        ),
        *((config, False) for config in AGAIN),
        *((config, True) for config in (PAMM, *AGAIN)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("_waiting_is_allowed_afterwards")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # the compiler's own
def test_nothing_waits_for_the_device(config: pamm.PammConfig, compiled: bool) -> None:
    torch._dynamo.reset()
    model, rows = Projections(config), x()
    run = torch.compile(model, fullgraph=True) if compiled else model
    for number in range(3):
        if number == 1:  # the first pass compiles
            torch.cuda.set_sync_debug_mode("error")
        torch.autograd.backward(run(rows), [torch.ones_like(rows)] * 3)
    with pytest.raises(RuntimeError, match="synchronizing"):  # so the passes above did not wait
        rows.sum().item()


def launches(work: object) -> int:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()  # type: ignore[operator]
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return len([e for e in kernels if "Memcpy" not in e.name])


@pytest.mark.parametrize("config", [PAMM, *AGAIN[:2]], ids=str)
def test_launches_of_a_group(config: pamm.PammConfig) -> None:
    """Against the same layers unconverted: three products forward, three and three backward."""
    counts = {}
    for each in (config, pamm.PammConfig("exact")):
        target, rows, grad = Projections(each), x(), torch.ones_like(x())

        def forward(target: Projections = target, rows: torch.Tensor = rows) -> list[torch.Tensor]:
            return target(rows)

        def backward(outputs: list[torch.Tensor], grad: torch.Tensor = grad) -> None:
            torch.autograd.backward(outputs, [grad] * 3)

        for _ in range(2):  # the first pass compiles, the second has gradients to add to
            backward(forward())
        target.zero_grad()
        ahead = launches(forward)
        outputs = forward()
        counts[each.method] = ahead, launches(lambda: backward(outputs))  # noqa: B023
        norm = launches(lambda: target.norm(rows))  # noqa: B023
    ahead, back = (a - b for a, b in zip(counts[config.method], counts["exact"], strict=True))
    once, for_each = LAUNCHES[config.method]
    assert ahead <= once
    assert back <= 3 * for_each + norm * config.recomputes


@pytest.mark.parametrize("k", [8, 200])
def test_more_than_2_to_the_31_elements(k: int) -> None:
    """X and G of 2^31 elements and more: an offset in 32 bits would point outside."""
    n = 512
    tokens = (1 << 31) // n + 1000
    torch.manual_seed(0)
    # Rows along few directions, the last ones along their own: they must be found and summed.
    directions = torch.randn(k, n, device="cuda").bfloat16()
    kind = torch.arange(tokens, device="cuda") % (k - 1)
    kind[-500:] = k - 1
    size = 1 + torch.rand(tokens, device="cuda").bfloat16()
    rows = directions[kind].mul_(size[:, None])
    first = torch.stack([torch.nonzero(kind == j)[0, 0] for j in range(k)])
    state = ops.compress(rows, first, None, "triton")
    assert torch.equal(state.assignment.long(), kind)
    expected = size.float() / size[first].float()[kind]
    torch.testing.assert_close(state.coefficients.float(), expected, rtol=2e-2, atol=0)
    del rows, kind, expected

    g = torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16).normal_()
    weight = ops.weight_grad(state, g, "triton")
    same_dtype = ops.weight_grad(state, g, "torch")
    sums = torch.zeros(k, n, dtype=torch.float64, device="cuda")
    for part in torch.arange(tokens, device="cuda").split(1 << 20):
        scaled = g[part].double() * state.coefficients[part].double()[:, None]
        sums.index_add_(0, state.assignment[part].long(), scaled)
    truth = sums.T @ state.generators.double()
    assert_implementation_error(weight, same_dtype, truth)


@pytest.mark.parametrize("tokens", [(1 << 31) // 512 + 1000])
def test_drawn_tokens_beyond_2_to_the_31_elements(tokens: int) -> None:
    """Only the last tokens have gradients, so that all of them are drawn, with weights near 1."""
    x = torch.empty(tokens, 512, device="cuda", dtype=torch.bfloat16).normal_()
    g = torch.zeros_like(x)
    g[-500:].normal_()
    offset = torch.tensor([0.5], device="cuda", dtype=torch.float64)
    x_rows, g_rows = ops.sample(x, g, sampling.sizes(g), 600, offset, None, "triton")
    truth = g[-500:].double().T @ x[-500:].double()
    assert relative_error(g_rows.T @ x_rows, truth) < 0.1  # some may be drawn twice


@pytest.mark.parametrize("config", [pamm.PammConfig("pamm", 1 / 512), *AGAIN[:2]], ids=str)
def test_the_peak_falls_by_x(config: pamm.PammConfig) -> None:
    """Held between forward and backward, by the allocator's own count."""
    rows, held = torch.cat([x()] * 4).detach().requires_grad_(), {}
    for each in (config, pamm.PammConfig("exact")):
        model = Projections(each)
        for _ in range(2):  # the first pass makes the products' workspace
            gc.collect()  # not while we count
            before = torch.cuda.memory_allocated()
            outputs = model(rows)
            held[each.method] = torch.cuda.memory_allocated() - before
            del outputs
    assert held["exact"] - held[config.method] >= 0.97 * rows.nbytes


def test_tuning_keeps_results_and_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles.chosen.cache_clear()
    tiles.tile.cache_clear()
    records = tune(
        Shape(TOKENS, FEATURES, FEATURES),
        PAMM,
        torch.device("cuda"),
        torch.bfloat16,
    )
    assert {record["kernel"].split()[0] for record in records} == {
        "assign",
        "segment_sum",
        "expand",
    }
    assert all(record["best_ms"] <= record["default_ms"] for record in records)
    assert tiles.cache_file().exists()
