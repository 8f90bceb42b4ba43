"""The exact way to the same memory: X is computed again in backward, from the norm's input.

Where a cheap module without randomness (a norm) makes X, X need not be kept: its input h is enough.
The module keeps h in place of everything its own backward needs, and the linear layers that read X
keep nothing at all. In backward the first of them that runs computes X again, once, together with
what the module's own backward needs; the others find it there.

Gradients are those of exact training, bit for bit. Under torch.compile the module is checkpointed
in the graph, and the compiler computes X again for its readers by itself, from one number a token
that it keeps as exact training does: 1 / the norm, so that no sum is taken again.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pamm.autograd import even
from pamm.functional import autocast_dtype
from pamm.nn import is_pamm, warn_if_frozen
from pamm.recomputation import Kept, Recomputation
from pamm.swap import Swapped, restore, swap


class _Again(NamedTuple):
    """In place of X, or of a cast or copy of it."""

    dtype: torch.dtype
    shape: torch.Size


def _policy(_: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    """Keep what is one number a token, and nothing else."""
    is_scale = op is torch.ops.aten.rsqrt.default and args[0].shape[-1:] == (1,)
    return CheckpointPolicy.MUST_SAVE if is_scale else CheckpointPolicy.MUST_RECOMPUTE


_CONTEXTS = functools.partial(create_selective_checkpoint_contexts, _policy)


class Recomputed(Swapped):
    """Mixed into the class of the module that makes X: its output is made again in backward."""

    pamm_group_names: set[str]
    """Of the groups that read it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's own forward; of one tensor the output is made again."""
        plain = super().forward  # type: ignore[misc]
        is_one = len(args) == 1 and not kwargs
        if not (is_one and self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        (h,) = args
        if torch.compiler.is_compiling():
            # Readers would make a copy of an uneven X outside, which the compiler would keep.
            again = lambda h: even(plain(h))  # noqa: E731
            return checkpoint(again, h, use_reentrant=False, context_fn=_CONTEXTS)  # type: ignore[return-value]
        if not self._keeps_its_weights():
            return plain(h)
        return Recomputation(plain, self).run(h)

    def _keeps_its_weights(self) -> bool:
        """Whether backward finds them as they are: not under ``functional_call``, nor where FSDP2
        shards this very module."""
        is_sharded = any(base.__name__ == "FSDPModule" for base in type(self).__mro__)
        return not is_sharded and all(isinstance(p, nn.Parameter) for p in self.parameters())


def _hooks_around() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Those that autograd would save with here. PyTorch has no public name for them (2.13): without
    this one they are passed over, and what they would let go of is kept."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)  # type: ignore[attr-defined]
    return top(False)  # type: ignore[no-any-return]


def storage_id(tensor: Tensor) -> int:
    """Which storage this is a view of. Not its address, which all on ``meta``, and all that are
    empty, have in common."""
    return tensor.untyped_storage()._cdata


class Recomputing(Swapped):
    """Mixed into a linear layer's class: it keeps no input that a ``Recomputed`` module made."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    pamm_group_name: str
    pamm_readers: list[nn.Module]

    __reduce_ex__ = Swapped.__reduce_ex__  # not that of a class below, which can be imported

    def forward(self, input: Tensor) -> Tensor:
        """x W.T + bias."""
        plain = super().forward  # type: ignore[misc]
        if is_pamm(self) or torch.compiler.is_compiling():
            return plain(input)  # a PAMM layer first takes the cast that its group shares
        if not (self.weight.requires_grad and torch.is_grad_enabled()):
            warn_if_frozen(self, self.pamm_readers)
            return plain(input)
        cast = input.to(autocast_dtype(input))
        read = even(cast) if isinstance(self, nn.Linear) else cast
        with self._saving(input, read):
            if read is cast:
                return plain(cast)
            y = F.linear(read, self.weight)  # as F.linear would, but of a copy that is known here
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _saving(self, input: Tensor, kept: Tensor) -> AbstractContextManager[object]:
        """X is not saved, as it is, cast or copied: backward asks for it again."""
        # Without a gradient (the first block above a frozen embedding) X has no node that keeps h.
        # Of an X that was written to since, autograd gives none, with an error.
        keeper: Any = None if torch.compiler.is_compiling() else input.grad_fn
        number = input.output_nr
        while type(keeper).__name__ == "BackwardHookFunctionBackward":  # of a full backward hook
            keeper, number = keeper.next_functions[number]
        made = getattr(keeper, "recomputation", None)
        if not isinstance(made, Recomputation):
            return nullcontext()
        made_again = {storage_id(input), storage_id(kept)}
        # All else goes to the hooks around (checkpointing, offloading), if there are any.
        keep, give = _hooks_around() or (Kept.of, Kept.unchanged)

        def pack(tensor: Tensor) -> Any:
            if storage_id(tensor) not in made_again:
                return keep(tensor)
            return _Again(tensor.dtype, tensor.shape)

        def unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _Again):
                return give(packed)
            return made.output(keeper).to(packed.dtype).reshape(packed.shape)

        return saved_tensors_hooks(pack, unpack)

    def extra_repr(self) -> str:
        """Shapes, and which group it is in: printing the model shows what was converted."""
        group = f"group={self.pamm_group_name}"
        below = super().extra_repr().removesuffix(f", {group}")  # if it is a PAMM layer as well
        return ", ".join(filter(None, (below, group, "recomputed")))

    __repr__ = nn.Module.__repr__


def attach(source: nn.Module, readers: Iterable[nn.Module], name: str = "") -> None:
    """Let ``readers``, the group ``name``, take their input from ``source`` again, in place."""
    if not isinstance(source, Recomputed):  # which may feed several groups
        swap(source, Recomputed)
        source.pamm_group_names = set()  # type: ignore[assignment]
    source.pamm_group_names.add(name)  # type: ignore[union-attr, operator]
    readers = list(readers)
    for reader in readers:
        swap(reader, Recomputing)
        reader.pamm_group_name, reader.pamm_readers = name, readers  # type: ignore[assignment]


def detach(model: nn.Module) -> int:
    """Undo every ``attach`` in ``model``; returns the number of readers there were."""
    readers = 0
    for module in model.modules():
        if isinstance(module, Recomputing):
            del module.pamm_group_name, module.pamm_readers
            readers += 1
        elif isinstance(module, Recomputed):
            del module.pamm_group_names
        else:
            continue
        restore(module)
    return readers


def left_unread(model: nn.Module, readers: Iterable[nn.Module]) -> dict[str, Recomputed]:
    """What would make X again for no one without these ``readers``, by name."""
    gone = {reader for reader in readers if isinstance(reader, Recomputing)}
    names = {reader.pamm_group_name for reader in gone}
    others = (m for m in model.modules() if isinstance(m, Recomputing) and m not in gone)
    still_read = {reader.pamm_group_name for reader in others}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Recomputed)
        and module.pamm_group_names & names
        and not module.pamm_group_names & still_read
    }


def group_layers(model: nn.Module) -> dict[str, list[str]]:
    """Names of the layers of every converted group, under the group's name."""
    layers: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if is_pamm(module):
            layers.setdefault(module.pamm_group.name, []).append(name)
    return layers | recomputed_groups(model)


def recomputed_groups(model: nn.Module) -> dict[str, list[str]]:
    """Names of the layers of every group whose input is recomputed, under the group's name."""
    layers: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Recomputing):
            layers.setdefault(module.pamm_group_name, []).append(name)
    return layers
