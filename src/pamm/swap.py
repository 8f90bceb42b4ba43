"""Give a module a subclass of its own class: how layers are converted and taken back.

Parameters, hooks, state_dict keys, device and optimizers already built stay as they are, because
the module stays the same object. Copies and pickles of it have the new class as well.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pamm.errors import PammError


class Swapped(nn.Module):
    """Base of the classes that are mixed into the class of an existing module."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        mixin, base = type(self).__bases__
        return _rebuild, (mixin, base), self.__getstate__()

    def _replicate_for_data_parallel(self) -> nn.Module:
        """PyTorch's name for the copy that each GPU's thread gets, at every step."""
        if self.training and torch.is_grad_enabled():
            raise PammError(
                "torch.nn.DataParallel trains copies of the layers in threads, which would share "
                "their draws and what they keep. Start one process for each GPU (torchrun, "
                "accelerate launch), or show this one a single GPU (CUDA_VISIBLE_DEVICES=0)."
            )
        return super()._replicate_for_data_parallel()  # type: ignore[no-any-return,operator]


@functools.cache
def mixed(mixin: type[Swapped], base: type[nn.Module]) -> type[Any]:
    """The class ``base`` with ``mixin`` before it; the same one each time."""
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {"__module__": base.__module__})


def swap(module: nn.Module, mixin: type[Swapped]) -> None:
    """Mix ``mixin`` into the class of ``module``, in place."""
    module.__class__ = mixed(mixin, type(module))


def restore(module: Swapped) -> None:
    """Undo ``swap``."""
    module.__class__ = type(module).__bases__[1]


def original(module: nn.Module) -> type[nn.Module]:
    """The class that it had before ``swap``, whatever was put over it since."""
    of_two = (each.__bases__ for each in type(module).__mro__ if len(each.__bases__) == 2)
    return next(base for mixin, base in of_two if issubclass(mixin, Swapped))


def refuse_covered(named: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse to ``restore`` layers whose class or forward something else has changed since.

    Args:
        named: the layers, as ``named_modules`` gives them; others may be among them.

    Raises:
        PammError: names the first such layer.
    """
    for name, module in named:
        mixin, *base = type(module).__bases__
        if not isinstance(module, Swapped):
            continue
        if "forward" in vars(module):
            raise PammError(
                f"{name or 'the model'} was given a forward of its own, which calls the converted "
                "one (hooks of Accelerate do that). Remove it before pamm.revert or "
                "pamm.convert."
            )
        if not (base and issubclass(mixin, Swapped)):
            raise PammError(
                f"{name or 'the model'} is {type(module).__name__}: a parametrization (or another "
                "change of its class) was put over the conversion. Remove it before pamm.revert or "
                "pamm.convert: torch.nn.utils.parametrize.remove_parametrizations."
            )


def _rebuild(mixin: type[Swapped], base: type[nn.Module]) -> nn.Module:
    made: Any = mixed(mixin, base)
    return made.__new__(made)
