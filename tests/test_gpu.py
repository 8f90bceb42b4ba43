"""What only a real GPU can show: it never waits, launches little, addresses beyond 2^31."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import pamm
from pamm import ops
from pamm.bench.op import Shape
from pamm.bench.tune import tune
from pamm.kernels import tiles
from tests.tolerances import assert_implementation_error

pytestmark = pytest.mark.gpu

TOKENS, FEATURES = 4096, 256
LAUNCHES_FORWARD = 3  # draw, gather, assign; once for q, k and v
LAUNCHES_BACKWARD = 2  # segment sum, expansion; for each projection


def attention(ratio: float) -> nn.ModuleDict:
    layers = {f"{name}_proj": nn.Linear(FEATURES, FEATURES, bias=False) for name in "qkv"}
    model = nn.ModuleDict(layers).to("cuda", torch.bfloat16)
    pamm.convert(model, pamm.PammConfig("pamm", ratio))
    return model


def x() -> torch.Tensor:
    return torch.randn(TOKENS, FEATURES, device="cuda", dtype=torch.bfloat16, requires_grad=True)


@pytest.fixture
def _waiting_is_allowed_afterwards() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tolerance", [None, 0.5, 0.0])
@pytest.mark.parametrize("ratio", [1 / 128, 1 / 16])
@pytest.mark.usefixtures("_waiting_is_allowed_afterwards")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_device(ratio: float, tolerance: float | None) -> None:
    layers = {f"{name}_proj": nn.Linear(FEATURES, FEATURES) for name in "qkv"}
    model = nn.ModuleDict(layers).to("cuda", torch.bfloat16)
    pamm.convert(model, pamm.PammConfig("pamm", ratio, tolerance=tolerance))
    rows = x()
    for number in range(3):
        if number == 1:  # the first pass compiles
            torch.cuda.set_sync_debug_mode("error")
        sum(layer(rows) for layer in model.values()).backward(torch.ones_like(rows))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="synchronizing"):  # so the passes above did not wait
        rows.sum().item()


def launches(work: object) -> int:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()  # type: ignore[operator]
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return len([e for e in kernels if "Memcpy" not in e.name])


def test_launches_of_a_group() -> None:
    """Against the same layers unconverted: three products forward, three and three backward."""
    model, plain = attention(1 / 128), attention(1 / 128)
    pamm.revert(plain)
    counts = {}
    for name, target in (("pamm", model), ("exact", plain)):
        rows, grad = x(), torch.ones(TOKENS, FEATURES, device="cuda", dtype=torch.bfloat16)

        def forward(
            target: nn.ModuleDict = target, rows: torch.Tensor = rows
        ) -> list[torch.Tensor]:
            return [layer(rows) for layer in target.values()]

        def backward(outputs: list[torch.Tensor], grad: torch.Tensor = grad) -> None:
            torch.autograd.backward(outputs, [grad] * 3)

        for _ in range(2):  # the first pass compiles, the second has gradients to add to
            backward(forward())
        target.zero_grad()
        ahead = launches(forward)
        outputs = forward()
        counts[name] = ahead, launches(lambda: backward(outputs))  # noqa: B023
    ahead, back = (a - b for a, b in zip(counts["pamm"], counts["exact"], strict=True))
    assert ahead <= LAUNCHES_FORWARD
    # Each projection's two take the place of exact's product, which may itself be two launches.
    assert back <= 3 * (LAUNCHES_BACKWARD - 1)


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


@pytest.mark.parametrize("tokens", [16_384])
def test_the_peak_falls_by_x(tokens: int) -> None:
    """Held between forward and backward, by the allocator's own count."""
    held = {}
    for converted in (True, False):
        model = attention(1 / 512)
        if not converted:
            pamm.revert(model)
        rows = torch.randn(tokens, FEATURES, device="cuda", dtype=torch.bfloat16)
        before = torch.cuda.memory_allocated()
        outputs = [layer(rows * 1.0) for layer in model.values()]
        del rows
        held[converted] = torch.cuda.memory_allocated() - before
        del outputs
    # Each layer read its own product here, so exact training holds three of them.
    assert held[False] - held[True] >= 0.97 * 3 * tokens * FEATURES * 2


def test_tuning_keeps_results_and_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiles.chosen.cache_clear()
    tiles.tile.cache_clear()
    records = tune(
        Shape(TOKENS, FEATURES, FEATURES),
        pamm.PammConfig("pamm", 1 / 128),
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
