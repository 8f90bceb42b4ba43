"""DDP and FSDP2 on two ranks: each draws its own rows, and all end with the same weights."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import pamm
from pamm.nn import groups
from tests.distributed.helpers import RANKS, run
from tests.helpers import Block, Model

STEPS = 3
SHAPE = (4, 16, 16)


def drawn(model: nn.Module) -> list[list[int]]:
    """The rows that each group drew last."""
    device = torch.device("cpu")
    return [group.stream.draw_again(64, 8, device).tolist() for group in groups(model)]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(RANKS * step + rank))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """For exact comparisons: of a gradient of zero, Adam steps along what rounding leaves."""
    return torch.optim.SGD(model.parameters(), lr=0.3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[Any]:
    seen = []
    for step in range(STEPS):
        pamm.seek(model, step)
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        seen.append(drawn(model))
    return seen


def result(model: nn.Module, seen: list[Any]) -> dict[str, Any]:
    weights = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        weights[name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")] = whole
    return {"draws": seen, "weights": weights}


def converted(ratio: float) -> Model:
    torch.manual_seed(0)
    model = Model()
    pamm.convert(model, pamm.PammConfig("pamm", ratio))
    return model


def ddp(rank: int) -> dict[str, Any]:
    model = converted(1 / 8)
    wrapped = DistributedDataParallel(model)
    seen = train(wrapped, adamw(wrapped), rank)
    return result(model, seen)


def fsdp(
    rank: int, checkpoints: bool, compiles: bool, ratio: float = 1 / 8, optimizer: Any = adamw
) -> dict[str, Any]:
    model = converted(ratio)
    if checkpoints:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda block: checkpoint_wrapper(
                block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False
            ),
            check_fn=lambda module: isinstance(module, Block),
        )
    for block in model.layers:
        if compiles:
            block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mp_policy=MixedPrecisionPolicy())
    fully_shard(model)
    seen = train(model, optimizer(model), rank)
    return result(model, seen)


TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "ddp": ddp,
    "fsdp2": functools.partial(fsdp, checkpoints=False, compiles=False),
    "fsdp2, checkpointing": functools.partial(fsdp, checkpoints=True, compiles=False),
    "fsdp2, compile": functools.partial(fsdp, checkpoints=False, compiles=True),
    "fsdp2, checkpointing, compile": functools.partial(fsdp, checkpoints=True, compiles=True),
    "fsdp2, every row": functools.partial(
        fsdp, checkpoints=True, compiles=True, ratio=1.0, optimizer=sgd
    ),
}


def all_tasks(rank: int) -> dict[str, Any]:
    made = {}
    for name, task in TASKS.items():
        torch.compiler.reset()
        made[name] = task(rank)
    return made


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of all tasks, on each rank."""
    return run(all_tasks, tmp_path_factory.mktemp("ranks"))


def exact_weights() -> dict[str, Tensor]:
    """What one process without PAMM ends with that sees the batches of both ranks."""
    model = Model()
    model.load_state_dict(converted(1.0).state_dict())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.cat([batch(rank, step) for rank in range(RANKS)])
        model(x).square().mean().backward()
        optimizer.step()
    return dict(model.state_dict())


PAMM = [name for name in TASKS if "every row" not in name]


@pytest.mark.parametrize("task", PAMM)
def test_ranks_end_with_equal_weights(task: str, results: list[dict[str, Any]]) -> None:
    first, second = (result[task]["weights"] for result in results)
    begin = Model().state_dict()
    assert first.keys() == begin.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        assert torch.isfinite(weight).all(), name
        assert not torch.equal(weight, begin[name]), name


@pytest.mark.parametrize("task", PAMM)
def test_each_rank_step_and_group_has_a_draw_of_its_own(
    task: str, results: list[dict[str, Any]]
) -> None:
    draws = [tuple(rows) for result in results for step in result[task]["draws"] for rows in step]
    assert len(draws) == RANKS * STEPS * 2
    assert len(set(draws)) == len(draws)


def test_sharded_training_with_every_row_kept_is_exact_training(
    results: list[dict[str, Any]],
) -> None:
    sharded = results[0]["fsdp2, every row"]["weights"]
    for name, weight in exact_weights().items():
        torch.testing.assert_close(sharded[name], weight, rtol=1e-4, atol=1e-5)
