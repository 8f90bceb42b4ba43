"""How far approximate weight gradients are off, on the inputs and gradients of a real model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from pamm.compressors import compressor
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.functional import compress
from pamm.stream import Stream
from pamm.surgery import is_converted, refuse_nothing, survey


class Recorded(NamedTuple):
    """What a group's weight gradient is made of."""

    x: Float[Tensor, "tokens n"]
    grads: dict[str, Float[Tensor, "tokens m"]]
    """By the last part of the layer's name: ``q_proj``."""


class Error(NamedTuple):
    """Of an estimate over several draws, relative to ||X.T G||: total^2 = bias^2 + noise^2."""

    total: float
    bias: float
    noise: float


def find_groups(model: nn.Module) -> dict[str, list[str]]:
    """Names of the layers of every group that ``pamm.convert`` finds.

    Raises:
        PammError: if the model is converted already, or has no such group.
    """
    if is_converted(model):
        raise PammError("the model is converted; call pamm.revert first.")
    report = survey(model, PammConfig("exact"))
    refuse_nothing(model, "attention", report)
    return {group.name: list(group.layers) for group in report.converted}


def record(
    model: nn.Module, groups: Mapping[str, Sequence[str]], passes: Sequence[Callable[[], Tensor]]
) -> dict[str, Recorded]:
    """X and the output gradients of the layers of ``groups``, over one or several passes.

    Args:
        model: in the mode to look at. Its gradients are thrown away.
        groups: names of layers, as ``find_groups`` gives them.
        passes: each runs the model and returns the loss; rows follow one another.
    """
    inputs: dict[str, list[Tensor]] = {name: [] for name in groups}
    grads: dict[str, dict[str, list[Tensor]]] = {name: {} for name in groups}
    handles = []

    def watch(group: str, name: str, is_first: bool) -> None:
        kept = grads[group].setdefault(name.rpartition(".")[2], [])

        def hook(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            if is_first:
                inputs[group].append(_rows(arguments[0]))
            output.register_hook(lambda grad: kept.append(_rows(grad)))

        handles.append(model.get_submodule(name).register_forward_hook(hook))

    for group, names in groups.items():
        for number, name in enumerate(names):
            watch(group, name, is_first=number == 0)
    try:
        for run in passes:
            (run() / len(passes)).backward()
            model.zero_grad()
    finally:
        for handle in handles:
            handle.remove()
    return {
        group: Recorded(
            torch.cat(inputs[group]), {name: torch.cat(g) for name, g in grads[group].items()}
        )
        for group in groups
    }


_LEARNING = 8
"""Forward passes for what a method carries to learn from X."""


@torch.no_grad()
def gradient_errors(recorded: Recorded, config: PammConfig, draws: int) -> dict[str, Error]:
    """Relative L2 error of each layer's weight gradient, split into bias and noise.

    E(r, eps) = ||dW~ - dW|| / ||dW|| (the paper's appendix on compression), as a root mean square
    over draws. Both parts are estimated without bias themselves; a bias below noise shows as 0.

    Args:
        recorded: X and G.
        config: the method.
        draws: how many, at least 2.
    """
    method, stream = compressor(config), Stream(config.seed, backend=config.backend)
    method.prepare(recorded.x.shape[1], recorded.x.device)
    for _ in range(_LEARNING):
        method.advance(recorded.x)
    samples = []
    for _ in range(draws):
        state = method.compress(recorded.x, stream.draw)
        if method.needs_x:
            state = (*state, recorded.x)
        samples.append([method.weight_grad(state, grad) for grad in recorded.grads.values()])
    errors = {}
    for number, (name, grad) in enumerate(recorded.grads.items()):
        exact = (grad.T @ recorded.x).double()
        each = torch.stack([sample[number].double() for sample in samples])
        mean = each.mean(0)
        noise = (each - mean).square().sum() / (draws - 1)
        bias = ((mean - exact).square().sum() - noise / draws).clamp(min=0)
        parts = torch.stack([bias + noise, bias, noise]).sqrt() / exact.norm()
        errors[name] = Error(*parts.tolist())
    return errors


@torch.no_grad()
def energy(recorded: Recorded, shares: Sequence[float]) -> dict[str, list[float]]:
    """How uneven X and G are: what some of X's directions and some of the tokens have of them.

    Under ``x`` the part of ||X||^2 in as many of its principal directions as each share of n says,
    under a layer's name that of ||G||^2 in as many of the tokens with the largest gradients.
    """
    x = recorded.x
    parts = {"x": torch.linalg.eigvalsh((x.T @ x).double()).clamp(min=0)}
    parts |= {name: g.double().square().sum(1) for name, g in recorded.grads.items()}
    found = {}
    for name, part in parts.items():
        along = part.sort(descending=True).values.cumsum(0) / part.sum()
        found[name] = [float(along[max(1, round(share * len(part))) - 1]) for share in shares]
    return found


class Projection(NamedTuple):
    """Rows of X and what stands for them, in the plane of X's first two principal components."""

    x: Float[Tensor, "tokens 2"]
    approximation: Float[Tensor, "tokens 2"]
    assignment: Integer[Tensor, " tokens"]
    explained: tuple[float, float]
    """Share of X's variance along each component."""


@torch.no_grad()
def principal_plane(x: Float[Tensor, "tokens n"], config: PammConfig) -> Projection:
    """PCA of X, and PAMM's A~ in the same plane."""
    compressed = compress(x, config)
    mean = x.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(x.T.double()))
    plane = vectors[:, -2:].flip(1).to(x.dtype)
    f = compressed.assignment.to(torch.int64)
    approximation = compressed.coefficients[:, None] * compressed.generators[f]
    share = (values[-2:].flip(0) / values.sum()).tolist()
    return Projection((x - mean) @ plane, (approximation - mean) @ plane, f, (share[0], share[1]))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])


def as_row(config: PammConfig, tokens: int, **more: Any) -> dict[str, Any]:
    """What was measured, beside how: one row of a results file."""
    return {
        "method": config.method,
        "ratio": config.ratio,
        "tolerance": config.tolerance,
        "k": config.generators(tokens),
        **more,
    }
