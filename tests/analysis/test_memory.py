import contextlib
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

import pamm
from pamm.analysis.memory import peak_bytes, saved_bytes
from pamm.recompute import group_layers
from tests.helpers import Model

WIDTH, SHAPE = 16, (4, 32, 16)
TOKENS = 4 * 32
X_BYTES = TOKENS * WIDTH * 4


def measure(method: str | None, autocast: bool = False, **changes: float) -> tuple[list[int], int]:
    """Measured bytes of each group, and the bytes predicted for one; None converts nothing."""
    model, x = Model(WIDTH), torch.randn(SHAPE)
    method_or_exact = method or "exact"
    ratio = None if method_or_exact == "exact" else 1 / 16
    config = pamm.PammConfig(method_or_exact, ratio, **changes)  # type: ignore[arg-type]
    report = pamm.convert(model, config, example=x)
    layers = group_layers(model)
    if method is None:
        pamm.revert(model)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        measured = saved_bytes(model, layers, lambda: model(x))
    assert list(measured) == [group.name for group in report.converted]
    return list(measured.values()), report.converted[0].held_bytes(TOKENS)


def test_exact_training_keeps_one_input_for_q_k_and_v() -> None:
    assert measure(None)[0] == [X_BYTES, X_BYTES]


def test_under_autocast_exact_training_keeps_three_copies_of_it() -> None:
    assert measure(None, autocast=True)[0] == [3 * X_BYTES // 2] * 2


@pytest.mark.parametrize("method", ["exact", "pamm", "uniform_crs", "compact"])
def test_a_converted_model_holds_exactly_what_is_predicted(method: str) -> None:
    measured, predicted = measure(method)
    assert measured == [predicted] * 2


@pytest.mark.parametrize("directions", [0, 4])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_state_is_counted_where_x_is_made_again(directions: int, autocast: bool) -> None:
    """Hooks of the layers themselves come between; the norm's input counts for the norm."""
    measured, predicted = measure("sampled", autocast, directions=directions)
    basis = WIDTH * directions * (2 if autocast else 4)
    assert measured == [8 + basis] * 2
    assert autocast or measured == [predicted] * 2


def test_measuring_leaves_the_method_as_it_was() -> None:
    model, x = Model(WIDTH), torch.randn(SHAPE)
    pamm.convert(model, pamm.PammConfig(), example=x)
    methods = [group.method for group in pamm.nn.groups(model)]
    with pytest.raises(ZeroDivisionError):
        saved_bytes(model, group_layers(model), lambda: (model(x), 1 // 0))
    assert all(a.method is b for a, b in zip(pamm.nn.groups(model), methods, strict=True))


def test_autocast_copies_of_weights_are_not_counted() -> None:
    k = TOKENS // 16
    assert measure("pamm", autocast=True)[0] == [k * WIDTH * 2 + TOKENS * 3 + 4] * 2


def test_weights_that_are_not_finite_are_recognised_too() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        layer.weight[0, 0], layer.weight[1, 1] = float("nan"), float("inf")
    with torch.autocast("cpu", torch.bfloat16):
        measured = saved_bytes(layer, {"layer": [""]}, lambda: layer(x))
    assert measured == {"layer": X_BYTES // 2}


def test_an_input_of_the_weights_size_is_not_taken_for_a_weight() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        measured = saved_bytes(layer, {"layer": [""]}, lambda: layer(x))
    assert measured == {"layer": WIDTH * WIDTH * 2}


def test_a_storage_counts_once_in_a_group_and_once_in_each_group() -> None:
    model, x = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abc"}), torch.zeros(10, 8)

    def forward() -> list[Tensor]:
        return [layer(x) for layer in model.values()]

    assert saved_bytes(model, {"ab": "ab", "c": "c"}, forward) == {"ab": 320, "c": 320}


def test_nothing_is_saved_without_gradients_and_hooks_are_gone_afterwards() -> None:
    model, x = Model(WIDTH), torch.randn(SHAPE)
    names = {"q": ["layers.0.attention.q_proj"]}
    with torch.no_grad():
        assert saved_bytes(model, names, lambda: model(x)) == {"q": 0}
    layer = model.get_submodule(names["q"][0])
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_hooks_are_gone_after_an_error_too() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="shapes"):
        saved_bytes(layer, {"layer": [""]}, lambda: layer(torch.zeros(2, 5)))
    assert not layer._forward_hooks
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):  # type: ignore[arg-type]
        layer(torch.zeros(2, 4))
    assert saved, "the hooks of the failed measurement are still the innermost ones"


def test_gradients_after_a_measurement_are_right() -> None:
    torch.manual_seed(1)
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    outputs: list[Tensor] = []
    saved_bytes(layer, {"layer": [""]}, lambda: outputs.append(layer(x)))
    outputs[0].sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(3, 5) @ x)  # type: ignore[arg-type]


@pytest.mark.parametrize("watched", ["", "0", "1"])
def test_what_was_saved_dies_with_the_measurement(watched: str) -> None:
    """Without the garbage collector, which does not know how large a tensor is."""
    first = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())  # which saves its output
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    def forward() -> None:
        hidden = first(torch.randn(5, 4))
        tensors = hidden, model(hidden)
        alive.extend(weakref.ref(each.untyped_storage()) for each in tensors)

    gc.disable()
    try:
        assert saved_bytes(model, {"layer": [watched]}, forward)["layer"] > 0
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


ALLOCATE = """
import torch
from pamm.analysis.memory import peak_bytes
cpu = torch.device("cpu")
before = peak_bytes(cpu)
torch.zeros(32 << 20, dtype=torch.float64).fill_(1)
assert 200 << 20 < peak_bytes(cpu) - before < 400 << 20, peak_bytes(cpu) - before
print(before)
"""


def test_the_peak_is_that_of_the_process_itself() -> None:
    """Not that of the process which started it, as getrusage says on Linux."""
    torch.zeros(96 << 20, dtype=torch.float64).fill_(1)
    assert peak_bytes(torch.device("cpu")) > 768 << 20
    done = subprocess.run([sys.executable, "-c", ALLOCATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 768 << 20
