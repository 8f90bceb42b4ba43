"""Train one small model of a type exactly, with PAMM and with recomputing, and compare."""

import copy
import dataclasses
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import logging

import pamm
from pamm.recompute import group_layers
from pamm.report import merge_skipped
from tests.sweep.tiny import build, inputs_of

CONFIG = pamm.PammConfig("pamm", 1 / 4)
LEFT_OUT = {
    "blt": "takes more than 10 s",
    "efficientnet": "takes more than 10 s; all convolutions",
    "textnet": "takes more than 10 s; all convolutions",
    "perceiver": "takes inputs under a name of its own",
}


@dataclasses.dataclass
class Step:
    """One forward and backward pass."""

    grads: dict[str, Tensor]
    kept: int
    """Bytes of all that is kept from forward to backward, each storage once, without parameters."""


def run(model: nn.Module, inputs: dict[str, Any]) -> Step:
    """One pass from the same random state each time; inputs with values get gradients too."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    inputs = {
        name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()
    }
    own = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    kept.clear()
    logits = output.logits if hasattr(output, "logits") else output[0]
    logits.float().square().sum().backward()
    named = [*model.named_parameters(), *inputs.items()]
    return Step({name: x.grad for name, x in named if x.grad is not None}, size)


@contextmanager
def inputs_of_groups(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Every tensor that a group's layers receive with gradients on, under the group's name."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for group, layers in group_layers(model).items():
        for layer in layers:

            def hook(_: nn.Module, args: tuple[Tensor, ...], group: str = group) -> None:
                met = seen.setdefault(group, [])
                if torch.is_grad_enabled() and not any(args[0] is x for x in met):
                    met.append(args[0])

            handles.append(model.get_submodule(layer).register_forward_pre_hook(hook))
    yield seen
    for handle in handles:
        handle.remove()


def outcome(kind: str, model_type: str) -> str:
    """``check`` in one line, for the page; exceptions of Transformers' own code included."""
    if model_type in LEFT_OUT:
        return f"not tried: {LEFT_OUT[model_type]}"
    try:
        return check(kind, model_type).replace("|", "/")
    except AssertionError:
        raise
    except Exception as error:  # of any kind: each says that our small model is none
        text = " ".join(str(error).split()).replace("|", "/")
        return f"not tried: {type(error).__name__}: {text[:140]}"


def quiet_outcome(case: tuple[str, str]) -> tuple[str, str, str]:
    """``outcome`` with its kind and type, for a process of its own; a failed check in words."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    try:
        return *case, outcome(*case)
    except AssertionError as error:
        return *case, f"FAILED: {error}"


def check(kind: str, model_type: str) -> str:
    """Check this type of model; returns what was converted, or why nothing was.

    Raises:
        AssertionError: if a gradient or the bytes freed are not as they should be.
        Exception: if the model cannot be built, or cannot be trained exactly either.
    """
    model = build(kind, model_type)
    inputs = inputs_of(model)
    exact = run(model, inputs)
    model.zero_grad()
    if any(not torch.equal(exact.grads[name], x) for name, x in run(model, inputs).grads.items()):
        raise ValueError("its own gradients differ from run to run")
    done = [check_pamm(model, inputs, exact, widen=False)]
    if "widen=True" in done[0]:
        done.append("with it " + check_pamm(model, inputs, exact, widen=True))
    return "; ".join((*done, check_recompute(model, inputs, exact)))


def check_pamm(model: nn.Module, inputs: dict[str, Any], exact: Step, widen: bool) -> str:
    """All gradients but those of converted weights are exact, and memory is freed as predicted."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    try:
        report = pamm.convert(twin, CONFIG, widen=widen)
    except pamm.NothingToConvertError as error:
        return f"no group: {str(error).split(' named ')[0].split(' was converted. ')[-1]}"
    assert report.problem is None, report.problem
    with inputs_of_groups(twin) as seen:
        ours = run(twin, inputs)
    layers = group_layers(twin)
    approximate = {f"{layer}.weight" for names in layers.values() for layer in names}
    compare(exact, ours, approximate)

    freed = sum(
        group.exact_bytes(tokens) - group.held_bytes(tokens)
        for group in report.converted
        for tokens in (x[..., 0].numel() for x in seen.get(group.name, ()))
    )
    measured = exact.kept - ours.kept
    assert measured == freed, f"{measured} bytes freed, {freed} predicted"
    torch.optim.SGD(twin.parameters(), lr=1e-3).step()
    assert all(parameter.isfinite().all() for parameter in twin.parameters())
    assert pamm.revert(twin) == sum(map(len, layers.values()))
    reasons = [f"not {name}: {reason}" for name, reason in merge_skipped(report.skipped)]
    return "; ".join((f"{len(report.converted)} groups", *reasons))


def check_recompute(model: nn.Module, inputs: dict[str, Any], exact: Step) -> str:
    """All gradients are exact, and less is kept."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    try:
        report = pamm.convert(twin, pamm.PammConfig("recompute"), targets=("attention", "mlp"))
    except pamm.NothingToConvertError:
        return "0 recomputed"
    ours = run(twin, inputs)
    compare(exact, ours, set())
    assert ours.kept < exact.kept
    return f"{len(report.converted)} recomputed"


def compare(exact: Step, ours: Step, approximate: set[str]) -> None:
    """Gradients are there, finite, and equal bit for bit unless ``approximate``."""
    assert ours.grads.keys() == exact.grads.keys()
    for name, grad in exact.grads.items():
        assert ours.grads[name].isfinite().all() or not grad.isfinite().all(), name
        if name not in approximate:
            assert torch.equal(grad, ours.grads[name]), f"gradient of {name} differs"
