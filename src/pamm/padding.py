"""Rows of padding stand for nothing, so none of them should be kept as a generator."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pamm.compressors import Compressor, Pamm
from pamm.errors import PammError
from pamm.nn import check_model, groups
from pamm.stream import Stream
from pamm.surgery import is_converted


def skip_padding(model: nn.Module, argument: str = "attention_mask") -> Callable[[], None]:
    """Draw generators among the tokens that are no padding, in every forward pass from now on.

    The gradient of a padded row is zero where the loss does not read it, so a generator that is
    one is lost; with k = 1 it can be the only one. k stays what the ratio says of all rows.
    Where a group has other rows than the mask (a vision tower), it draws as before; so does the
    decoder where there is an encoder, for the mask is of the encoder's tokens; and so does every
    other method than PAMM's without a tolerance: ``uniform_crs`` and a tolerance below 1 scale the
    gradient by all rows, and are unbiased only if they draw among all; the other methods draw no
    rows to keep. For eager models: the mask lies outside a compiled graph.

    Args:
        model: converted; call this after ``convert``, and again after another one.
        argument: of the model's forward, given by name: (batch, tokens), 0 at padding. Passes
            without it, or with a mask of another rank, draw from all rows.

    Returns:
        A function that ends this; call it between two steps.

    Raises:
        PammError: if the model is not converted.

    Examples:
        >>> import pamm
        >>> model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("query", "key", "value")})
        >>> report = pamm.convert(model, pamm.PammConfig("pamm"))
        >>> stop = skip_padding(model)
        >>> stop()
    """
    check_model(model)
    if not is_converted(model):
        raise PammError("this model has no PAMM layers; call pamm.convert(model) first.")
    others = _decoder(model)
    streams = [
        group.stream
        for group in groups(model)
        if _keeps_every_row(group.method) and others.isdisjoint(group.layers)
    ]
    handle = model.register_forward_pre_hook(_Mask(argument, streams), with_kwargs=True)

    def stop() -> None:
        handle.remove()
        for stream in streams:
            stream.valid = None

    return stop


class _Mask:
    """A hook that tells streams which rows are no padding. A copy of the model has its own."""

    def __init__(self, argument: str, streams: list[Stream]) -> None:
        self._argument, self._streams = argument, streams

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get(self._argument)
        rows = None
        if isinstance(mask, Tensor) and mask.ndim == 2:
            rows = mask.reshape(-1).bool()
        # It stays until the next pass, for blocks that are computed again in backward.
        for stream in self._streams:
            stream.valid = rows


def _decoder(model: nn.Module) -> set[nn.Module]:
    """All modules of the decoder where there is an encoder, too."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return set()
    return set(model.get_decoder().modules())  # type: ignore[operator]


def _keeps_every_row(method: Compressor) -> bool:
    """Whether a generator stands for every row, so that the draw decides no scale."""
    if not isinstance(method, Pamm):
        return False
    tolerance = method.config.tolerance
    return tolerance is None or tolerance >= 1
