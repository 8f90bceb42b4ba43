"""How good the weight gradients of a training step are, and what the groups held in it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pamm import ops
from pamm.compressors import Compressor, Recompute, State
from pamm.errors import PammError
from pamm.naming import bare, patterns, selected
from pamm.nn import Pamm, check_model, groups, is_pamm, refuse_same_names
from pamm.sharing import Group
from pamm.stream import Draw
from pamm.surgery import is_converted
from pamm.types import accumulation_dtype


class Watched:
    """What ``watch`` saw; read it after backward."""

    def __init__(self) -> None:
        self._groups: dict[str, _Watcher] = {}
        self._layers: dict[str, list[_LayerWatcher]] = {}

    def metrics(self) -> dict[str, float]:
        """Numbers by name; empty if no group ran.

        ``held_bytes``: of all groups together, in the last forward pass. ``dropped_share``: of
        tokens that the tolerance dropped, in all groups. For each chosen layer ``cosine/LAYER`` and
        ``relative_error/LAYER`` of its weight gradient against the exact one of the same pass:
        <a, e> / (||a|| ||e||) and ||a - e|| / ||e||; and ``lost/LAYER``, the part of the exact
        gradient that does not arrive: 1 - <a, e> / ||e||^2, which averages to zero over steps
        for a method without bias, however large its error is. The same for each chosen group, the
        gradients of its layers taken as one vector.
        """
        ran = [each for each in self._groups.values() if each.tokens]
        if not ran:
            return {}
        dropped = sum(float(each.dropped_tokens) for each in ran)
        numbers = {
            "held_bytes": float(sum(each.held for each in ran)),
            "dropped_share": dropped / sum(each.tokens for each in ran),
        }
        for name, layers in self._layers.items():
            seen = [each.products for each in layers if each.products is not None]
            if seen:
                numbers |= _compared(name, *torch.stack(seen).sum(0).tolist())
        return numbers


def _compared(name: str, approximate: float, exact: float, mixed: float) -> dict[str, float]:
    """From ||a||^2, ||e||^2 and <a, e>."""
    numbers = {}
    if exact > 0:
        error = max(0.0, approximate - 2 * mixed + exact)
        numbers[f"relative_error/{name}"] = (error / exact) ** 0.5
        numbers[f"lost/{name}"] = 1 - mixed / exact
        if approximate > 0:
            numbers[f"cosine/{name}"] = mixed / (approximate * exact) ** 0.5
    return numbers


@contextmanager
def watch(model: nn.Module, chosen: Iterable[str] | None = None) -> Iterator[Watched]:
    """Measure the forward and backward pass inside, without changing it.

    Groups with a chosen layer keep X until backward, and chosen layers compute their exact weight
    gradient as well, so watch a step now and then. Not for compiled models: the compiler would
    start again.

    Args:
        model: converted.
        chosen: patterns of names to compare with the exact gradient: of layers, or of groups, which
            stand for themselves and for each of their layers. The middle group by default.

    Raises:
        PammError: if no converted layer and no group has such a name, or two groups have one; or
            if no group has an approximate gradient.

    Examples:
        >>> import pamm
        >>> from torch.nn import Linear
        >>> model = nn.ModuleDict({name: Linear(8, 8) for name in ("query", "key", "value")})
        >>> report = pamm.convert(model, pamm.PammConfig("pamm", 1.0))
        >>> x = torch.randn(32, 8)
        >>> with watch(model, ["query"]) as seen:
        ...     sum(layer(x) for layer in model.values()).sum().backward()
        >>> round(seen.metrics()["cosine/query"], 4)
        1.0
    """
    check_model(model)
    found = groups(model)
    if all(isinstance(group.method, Recompute) for group in found):
        raise PammError(
            "there is nothing to watch: with method 'recompute' all gradients are exact."
            if is_converted(model)
            else "this model has no PAMM layers; call pamm.convert(model) first."
        )
    refuse_same_names(found)
    watched = Watched()
    methods = [group.method for group in found]
    picked = _picked(model, found, chosen)
    try:
        for group in found:
            watched._groups[group.name] = group.method = _Watcher(group.method)
        made: dict[Pamm, _LayerWatcher] = {}
        for name, layers in picked.items():
            for layer in layers:
                if layer not in made:
                    made[layer] = _LayerWatcher(layer.pamm_group.method)
                    layer.pamm_watcher = made[layer]
            watched._layers[name] = [made[layer] for layer in layers]
        yield watched
    finally:
        for group, method in zip(found, methods, strict=True):
            group.method = method
        for layers in picked.values():
            for layer in layers:
                layer.__dict__.pop("pamm_watcher", None)


def _picked(
    model: nn.Module, found: list[Group], chosen: Iterable[str] | None
) -> dict[str, list[Pamm]]:
    """Layers to compare, under their own names and under those of whole groups."""
    layers = {_bare(name): layer for name, layer in model.named_modules() if is_pamm(layer)}
    of_group: dict[str, list[Pamm]] = {group.name: [] for group in found}
    for layer in layers.values():
        of_group[layer.pamm_group.name].append(layer)
    names = [*of_group]
    wanted = [] if chosen is None else patterns("chosen", chosen)
    if chosen is None:
        whole = set(names[len(names) // 2 : len(names) // 2 + 1])
    else:
        whole = {name for name in names if selected(name, wanted, None)}
    single = {
        name: [layer]
        for name, layer in layers.items()
        if layer.pamm_group.name in whole or selected(name, wanted, None)
    }
    if wanted and not (whole or single):
        raise PammError(f"no group is named like {', '.join(wanted)}; there are {names}.")
    return {name: of_group[name] for name in names if name in whole} | single


def _bare(name: str) -> str:
    """The name in the model as it was converted, without what wrappers put into it."""
    return bare(name).replace("_checkpoint_wrapped_module.", "").removeprefix("module.")


class StandIn:
    """A compressor that does what another one does."""

    def __init__(self, method: Compressor) -> None:
        self._method = method
        self.needs_x = method.needs_x

    def prepare(self, in_features: int, device: torch.device) -> None:
        self._method.prepare(in_features, device)

    def move(self, device: torch.device) -> None:
        self._method.move(device)

    def carried(self) -> dict[str, Tensor]:
        return self._method.carried()

    def advance(self, x: Float[Tensor, "tokens n"]) -> None:
        self._method.advance(x)

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        return self._method.compress(x, draw)

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        return self._method.weight_grad(state, grad)

    def dropped(self, state: State, tokens: int) -> Tensor | float:
        return self._method.dropped(state, tokens)

    def state_bytes(self, tokens: int, in_features: int, dtype: torch.dtype) -> int:
        return self._method.state_bytes(tokens, in_features, dtype)


class _Watcher(StandIn):
    """One that looks at what a group keeps."""

    def __init__(self, method: Compressor) -> None:
        super().__init__(method)
        self.held, self.tokens = 0, 0
        self.dropped_tokens: Tensor | float = 0.0

    def compress(self, x: Float[Tensor, "tokens n"], draw: Draw) -> State:
        state = super().compress(x, draw)
        # A layer that checkpointing runs again compresses again: the last state counts.
        self.held = sum(tensor.untyped_storage().nbytes() for tensor in state)
        self.tokens = len(x)
        self.dropped_tokens = self.dropped(state, len(x))
        return state


class _LayerWatcher(StandIn):
    """One that compares the weight gradient of a layer with the exact one.

    X follows the state, so that each pass of a layer that runs several times has its own.
    """

    def __init__(self, method: Compressor) -> None:
        super().__init__(method)
        self.needs_x = True
        self.products: Tensor | None = None

    def weight_grad(self, state: State, grad: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
        x = state[-1]
        made = super().weight_grad(state if self._method.needs_x else state[:-1], grad)
        with ops.no_autocast(grad):
            dtype = accumulation_dtype(grad.dtype)
            approximate, exact = made.double(), (grad.to(dtype).T @ x.to(dtype)).double()
            pairs = (approximate, approximate), (exact, exact), (approximate, exact)
            products = torch.stack([(a * b).sum() for a, b in pairs])
        self.products = products if self.products is None else self.products + products
        return made
