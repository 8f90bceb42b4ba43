"""How good the weight gradients of a training step are, and what the groups held in it."""

import fnmatch
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pamm.compressors import Compressor, State
from pamm.errors import PammError
from pamm.nn import groups
from pamm.stream import Draw
from pamm.types import Compressed


class Watched:
    """What ``watch`` saw; read it after backward."""

    def __init__(self) -> None:
        self._watchers: dict[str, _Watcher] = {}

    def metrics(self) -> dict[str, float]:
        """Numbers by name; empty if no group ran.

        ``held_bytes``: of all groups together, in the last forward pass. ``dropped_share``: of
        tokens that the tolerance dropped, in all groups. For each chosen group ``cosine/GROUP`` and
        ``relative_error/GROUP`` of its weight gradients against the exact ones of the same pass,
        those of q, k and v taken as one vector: <a, e> / (||a|| ||e||) and ||a - e|| / ||e||.
        """
        ran = {name: each for name, each in self._watchers.items() if each.tokens}
        if not ran:
            return {}
        dropped = sum(float(each.dropped) for each in ran.values())
        numbers = {
            "held_bytes": float(sum(each.held for each in ran.values())),
            "dropped_share": dropped / sum(each.tokens for each in ran.values()),
        }
        for name, each in ran.items():
            if each.products is not None:
                approximate, exact, mixed = each.products.tolist()
                if exact > 0:
                    error = max(0.0, approximate - 2 * mixed + exact)
                    numbers[f"relative_error/{name}"] = (error / exact) ** 0.5
                    if approximate > 0:
                        numbers[f"cosine/{name}"] = mixed / (approximate * exact) ** 0.5
        return numbers


@contextmanager
def watch(model: nn.Module, chosen: Iterable[str] | None = None) -> Iterator[Watched]:
    """Measure the forward and backward pass inside, without changing it.

    Chosen groups keep X until backward and compute their exact weight gradient as well, so watch a
    step now and then. Not for compiled models: the compiler would start again.

    Args:
        model: converted.
        chosen: patterns of group names to compare with the exact gradient; the middle group by
            default.

    Raises:
        PammError: if no group has such a name.

    Example:
        >>> import pamm
        >>> from torch.nn import Linear
        >>> model = nn.ModuleDict({name: Linear(8, 8) for name in ("query", "key", "value")})
        >>> report = pamm.convert(model, pamm.PammConfig(ratio=1.0))
        >>> x = torch.randn(32, 8)
        >>> with watch(model) as seen:
        ...     sum(layer(x) for layer in model.values()).sum().backward()
        >>> round(seen.metrics()["cosine/{query,key,value}"], 4)
        1.0
    """
    found = groups(model)
    names = [group.name for group in found]
    if chosen is None:
        picked = set(names[len(names) // 2 : len(names) // 2 + 1])
    else:
        patterns = [chosen] if isinstance(chosen, str) else list(chosen)
        picked = {name for name in names for each in patterns if fnmatch.fnmatchcase(name, each)}
        if not picked:
            raise PammError(f"no group is named like {', '.join(patterns)}; there are {names}.")
    watched = Watched()
    methods = [group.method for group in found]
    try:
        for group in found:
            watcher = _Watcher(group.method, group.name in picked)
            watched._watchers[group.name] = group.method = watcher  # type: ignore[assignment]
        yield watched
    finally:
        for group, method in zip(found, methods, strict=True):
            group.method = method


class _Watcher:
    """A compressor that does what another one does, and looks."""

    def __init__(self, method: Compressor, compares: bool) -> None:
        self._method, self._compares = method, compares
        self._x: Tensor | None = None
        self.held, self.tokens = 0, 0
        self.dropped: Tensor | float = 0.0
        self.products: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)  # what is not watched

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        state = self._method.compress(x, draw)
        # A layer that checkpointing runs again compresses again: the last state counts.
        self.held = sum(tensor.untyped_storage().nbytes() for tensor in state)
        self.tokens = len(x)
        self.dropped = 0.0
        if len(state) == len(Compressed._fields):
            self.dropped = len(x) * (1 - 1 / Compressed(*state).normalization)
        elif len(state) == 2:  # sampled rows and their numbers
            self.dropped = float(len(x) - len(state[1]))
        if self._compares:
            self._x = x.detach()
        return state

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        made = self._method.weight_grad(state, grad)
        if self._compares:
            self._compare(made, grad)
        return made

    def _compare(self, made: Tensor, grad: Tensor) -> None:
        assert self._x is not None
        with torch.autocast(grad.device.type, enabled=False):
            approximate, exact = made.double(), (grad.float().T @ self._x.float()).double()
            products = torch.stack(
                [(a * b).sum() for a, b in
                 ((approximate, approximate), (exact, exact), (approximate, exact))]
            )  # fmt: skip
        self.products = products if self.products is None else self.products + products

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        return self._method.state_bytes(tokens, in_features, dtype)
