"""PAMM inside what training loops do: accumulation, checkpointing, loss scaling, resuming."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pamm
from pamm.config import METHODS
from pamm.nn import groups
from tests.helpers import NAMES, Model, counted_compressions, saved_bytes, saved_tensors

CONFIG = pamm.PammConfig("pamm", 1 / 8)


def converted(config: pamm.PammConfig = CONFIG, dropout: float = 0.0) -> Model:
    model = Model(dropout=dropout)
    pamm.convert(model, config)
    return model


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]


def test_gradient_accumulation_adds_up_separate_passes() -> None:
    model = converted()
    batches = [torch.randn(2, 20, 16) for _ in range(3)]
    parts = []
    for batch in batches:
        model.zero_grad()
        model(batch).sum().backward()
        parts.append(grads(model))
    pamm.seek(model, 0)
    model.zero_grad()
    for batch in batches:
        model(batch).sum().backward()
    for name, total in grads(model).items():
        assert torch.allclose(total, sum(part[name] for part in parts), atol=1e-5), name


def test_micro_batches_of_one_step_draw_different_rows() -> None:
    model, x = converted(), torch.randn(2, 20, 16)
    seen = []
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        seen.append(model.layers[0].attention.q_proj.weight.grad.clone())
    assert not torch.equal(*seen)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_gives_the_same_exact_gradients(
    reentrant: bool, dropout: float
) -> None:
    model = converted(dropout=dropout)
    x = torch.randn(2, 20, 16, requires_grad=True)
    torch.manual_seed(3)
    model(x).square().sum().backward()
    plain, plain_x = grads(model), x.grad.clone()

    model.zero_grad()
    x.grad = None
    torch.manual_seed(3)
    y = x
    with counted_compressions(groups(model)) as shapes:
        for layer in model.layers:
            y = checkpoint(layer, y, use_reentrant=reentrant)
        model.head(y).square().sum().backward()
    # The recomputation compresses anew; a reentrant first pass runs without gradients and does not.
    assert len(shapes) == (2 if reentrant else 4)
    assert torch.equal(x.grad, plain_x)
    for name, grad in grads(model).items():
        if not any(f"{q}.weight" in name for q in NAMES):
            assert torch.equal(grad, plain[name]), name
        else:
            assert grad.isfinite().all()
            assert grad.norm() > 0


def test_with_every_row_kept_checkpointing_gives_the_exact_weight_gradient() -> None:
    model = converted(pamm.PammConfig("pamm", 1.0))
    x = torch.randn(2, 20, 16, requires_grad=True)
    model(x).square().sum().backward()
    plain = grads(model)
    model.zero_grad()
    y = x
    for layer in model.layers:
        y = checkpoint(layer, y, use_reentrant=False)
    model.head(y).square().sum().backward()
    for name, grad in grads(model).items():
        assert torch.allclose(grad, plain[name], atol=1e-4), name


def test_saved_tensors_can_be_offloaded() -> None:
    model, x = converted(), torch.randn(2, 20, 16)
    model(x).sum().backward()
    plain = grads(model)
    pamm.seek(model, 0)
    model.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        y = model(x)
    y.sum().backward()
    assert all(torch.equal(grad, plain[name]) for name, grad in grads(model).items())


@pytest.mark.parametrize("config", [CONFIG, pamm.PammConfig("pamm", 1 / 8, tolerance=0.5)])
def test_loss_scaler_sees_an_overflow_and_skips_the_step(config: pamm.PammConfig) -> None:
    model = converted(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = copy.deepcopy(model.state_dict())
    target = model.layers[0].attention.q_proj

    def step(poison: bool) -> None:
        optimizer.zero_grad()
        hook = target.register_full_backward_pre_hook(
            lambda _, grad: (grad[0] * torch.inf,) if poison else None
        )
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(2, 20, 16)).float().square().mean()
        scaler.scale(loss).backward()
        hook.remove()
        scaler.step(optimizer)
        scaler.update()

    step(poison=True)
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    step(poison=False)
    assert not torch.equal(before["layers.0.attention.q_proj.weight"], target.weight)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        pamm.seek(model, step)
        batch = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(step))
        for micro_batch in batch:
            model(micro_batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    straight = converted()
    fresh = copy.deepcopy(straight.state_dict())
    optimizer = torch.optim.AdamW(straight.parameters())
    train(straight, optimizer, range(6))

    first = converted()
    first.load_state_dict(fresh)
    optimizer = torch.optim.AdamW(first.parameters())
    train(first, optimizer, range(3))
    weights, state = copy.deepcopy((first.state_dict(), optimizer.state_dict()))

    resumed = converted()
    resumed.load_state_dict(weights)
    optimizer = torch.optim.AdamW(resumed.parameters())
    optimizer.load_state_dict(state)
    train(resumed, optimizer, range(3, 6))
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_seed_is_another_run() -> None:
    x = torch.randn(2, 20, 16)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        model = converted(pamm.PammConfig("pamm", 1 / 8, seed=seed))
        model(x).sum().backward()
        results.append(model.layers[0].attention.q_proj.weight.grad)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_converted_model_holds_the_predicted_bytes_and_no_more() -> None:
    """Against exact training, exactly X is replaced by the state, in every block."""
    model, x = Model(layers=3), torch.randn(4, 25, 16)
    parameters = list(model.parameters())
    with saved_tensors() as exact:
        kept = model(x)
    report = pamm.convert(model, CONFIG)
    with saved_tensors() as compressed:
        also_kept = model(x)
    difference = saved_bytes(exact, parameters) - saved_bytes(compressed, parameters)
    assert difference == report.exact_bytes(100) - report.held_bytes(100)
    assert report.exact_bytes(100) == 3 * 100 * 16 * 4
    del kept, also_kept


def test_training_with_pamm_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = converted(pamm.PammConfig("pamm", 1 / 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    teacher, x = Model(), torch.randn(8, 20, 16)
    y = teacher(x).detach()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    "config",
    [
        *map(pamm.PammConfig, METHODS),
        pamm.PammConfig("sampled", 1 / 4, directions=4),
    ],
    ids=str,
)
def test_several_gradients_in_one_backward_pass_are_those_of_several_passes(
    config: pamm.PammConfig,
) -> None:
    model, x = Model().double(), torch.randn(2, 20, 16, dtype=torch.float64)
    pamm.convert(model, config, example=x)
    y, weights = model(x), list(model.parameters())
    given = torch.randn(3, *y.shape, dtype=torch.float64)
    single = [torch.autograd.grad(y, weights, each, retain_graph=True) for each in given]
    together = torch.autograd.grad(y, weights, given, is_grads_batched=True)
    for ours, *expected in zip(together, *single, strict=True):
        torch.testing.assert_close(ours, torch.stack(expected))


def test_a_pytorch_without_the_private_name_of_its_older_vmap_will_do() -> None:
    script = (
        "import torch, torch._subclasses.fake_tensor\n"  # which asks for that name itself
        "del torch._C._functorch.is_legacy_batchedtensor\n"
        "import pamm; assert len(pamm.compress(torch.ones(4, 2)).assignment) == 4\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
