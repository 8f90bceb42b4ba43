"""Give a module a subclass of its own class: how layers are converted and taken back.

Parameters, hooks, state_dict keys, device and optimizers already built stay as they are, because
the module stays the same object. Copies and pickles of it have the new class as well.
"""

import functools
from typing import Any

from torch import nn


class Swapped(nn.Module):
    """Base of the classes that are mixed into the class of an existing module."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        mixin, base = type(self).__bases__
        return _rebuild, (mixin, base), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


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


def _rebuild(mixin: type[Swapped], base: type[nn.Module]) -> nn.Module:
    made: Any = mixed(mixin, base)
    return made.__new__(made)
