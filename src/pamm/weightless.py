"""Run a model on the ``meta`` device: shapes and no values, so no memory and no arithmetic.

What does not depend on weights (ids, masks, positions) is computed for real on the CPU, so that
the model's own decisions come out as in training. Where a decision would need a weight's value it
gets a made-up one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten


class Weightless(TorchDispatchMode):
    """Operations on what has no values have none; all others run for real on the CPU.

    Args:
        before: called for every operation, with its tensors, before it runs.
        after: called for every tensor that an operation returns.
    """

    def __init__(
        self,
        before: Callable[[Any, list[Tensor]], object] = lambda func, tensors: None,
        after: Callable[[Tensor], object] = lambda tensor: None,
    ) -> None:
        super().__init__()
        self._before, self._after = before, after
        # As if nothing were zero; for the operations that look for it themselves.
        self._nonzero: Any = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]

    def __enter__(self) -> "Weightless":
        self._nonzero.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._nonzero.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._before(func, tensors)
        no_values = any(tensor.is_meta for tensor in tensors)
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta" if no_values else "cpu")
        made = self._run(func, args, kwargs, tensors) if no_values else _real(func, args, kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._after(leaf)
        return made

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> object:
        if func is aten._local_scalar_dense.default:
            return torch.ones((), dtype=tensors[0].dtype).item()
        if func is aten.equal.default:
            return True
        if func is aten.nonzero.default:
            return torch.ones(tensors[0].shape, dtype=torch.bool, device="cpu").nonzero()
        if func is aten._grouped_mm.default and (shape := _grouped(*tensors)):
            return tensors[0].new_empty(shape, device="meta")
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to("meta"), (args, kwargs)
        )
        return func(*args, **kwargs)


def _real(func: Any, args: Any, kwargs: Any) -> object:
    if func is aten.rand.default:  # layers that are left out at random are not left out
        return torch.ones(*args, **kwargs)
    return func(*args, **kwargs)


def _grouped(a: Tensor, b: Tensor, *ends: Tensor) -> tuple[int, ...] | None:
    """The shape of a grouped product, which ``meta`` knows for bf16 alone; None for its others."""
    if a.ndim == 2 and b.ndim == 3:
        return len(a), b.shape[-1]
    return (len(ends[0]), len(a), b.shape[-1]) if a.ndim == b.ndim == 2 else None
