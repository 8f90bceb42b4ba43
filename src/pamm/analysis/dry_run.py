"""One training step without weights, values or a GPU: what is kept for backward, and the peak.

The model is on the ``meta`` device: its tensors have shapes and no values, so a model of any size
runs in seconds and in no memory. What does not depend on weights (ids, masks, positions) is computed
for real, so that the model's own decisions come out as in training.

Operations are those of a CUDA device: fused attention, dropout masks of one byte, CUDA's autocast.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten


@dataclasses.dataclass
class Kept:
    """A piece of memory that is kept from forward until backward."""

    bytes: int
    keepers: set[str]
    """Names of the modules that keep it."""


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What one training step keeps, in bytes; Parameters themselves are not in it."""

    kept: tuple[Kept, ...]
    """Everything that is kept for backward, each piece of memory once."""
    weight_copies: int
    """Of these, autocast's copies of Parameters."""
    rows: Mapping[str, int]
    """Rows of the input that each linear layer received."""
    inputs: Mapping[str, frozenset[int]]
    """Which pieces of ``kept`` are the inputs that a linear layer received, by its name."""
    peak: int
    """The most that was alive at a time, in forward and backward, gradients included."""

    @property
    def saved(self) -> int:
        """Bytes kept from forward until backward."""
        return sum(each.bytes for each in self.kept)

    def freed(self, layers: set[str]) -> int:
        """Bytes that are kept by these layers and by no one else."""
        return sum(each.bytes for each in self.kept if each.keepers and each.keepers <= layers)

    def below(self, prefix: str) -> int:
        """Bytes kept by a module or by modules in it."""
        dot = f"{prefix}."
        return sum(
            each.bytes
            for each in self.kept
            if any(f"{name}.".startswith(dot) for name in each.keepers)
        )

    def others(self, layers: set[str]) -> set[str]:
        """Who else keeps an input of these layers."""
        kept = [self.kept[number] for layer in layers for number in self.inputs.get(layer, ())]
        return {name for each in kept for name in each.keepers} - layers


def dry_run(
    model: nn.Module, loss: Callable[[], Tensor], autocast: torch.dtype | None = None
) -> DryRun:
    """Run one forward and backward pass of ``model``, all of its tensors on ``meta``.

    Memory is counted as PyTorch's allocator on CUDA would hand it out, without the rounding of
    blocks, the libraries' own workspaces and what one kernel needs for itself.

    Args:
        model: in the mode to look at. Gradients that it has are removed.
        loss: one forward pass; gives the loss.
        autocast: the dtype to compute in, as CUDA's autocast does it; ``None`` is without.

    Example:
        >>> model = nn.Linear(8, 8, device="meta")
        >>> dry_run(model, lambda: model(torch.empty(100, 8, device="meta")).sum()).saved
        3200
    """
    model.zero_grad(set_to_none=True)
    memory = _Memory(model)
    with ExitStack() as stack:
        watch = _Watch(model, memory)
        stack.callback(watch.end)
        cuda = stack.enter_context(LikeCuda(autocast))
        stack.enter_context(_Weightless(memory))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        with saved_tensors_hooks(watch.pack, lambda tensor: tensor):
            result = loss()
        copies = {_key(copy) for copy in cuda.weight_copies.values()} & watch.kept.keys()
        numbers = {key: number for number, key in enumerate(watch.kept)}
        kept = tuple(Kept(size, keepers) for size, keepers in watch.kept.values())
        weight_copies = sum(watch.kept[key][0] for key in copies)
        watch.forget()
        cuda.weight_copies.clear()
        result.backward()
        del result
    model.zero_grad(set_to_none=True)
    inputs = {
        name: frozenset(numbers[key] for key in keys if key in numbers)
        for name, keys in watch.inputs.items()
    }
    return DryRun(kept, weight_copies, watch.rows, inputs, memory.peak)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Memory:
    """Bytes alive now and at most, the model's own not counted."""

    def __init__(self, model: nn.Module) -> None:
        self.now = self.peak = 0
        own = [*model.parameters(), *model.buffers()]
        self._references: dict[int, Any] = {_key(tensor): None for tensor in own}
        self.own = frozenset(self._references)

    def meet(self, tensor: Tensor) -> None:
        """Count a tensor that was just made, until it dies."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._references:
            return

        def died(_: object) -> None:
            self.now -= size
            del self._references[key]

        self._references[key] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)


class _Weightless(TorchDispatchMode):
    """Operations on what has no values have none; all others run for real on the CPU."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        no_values = any(tensor.is_meta for tensor in tensors)
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta" if no_values else "cpu")
        if no_values:
            if func is aten._local_scalar_dense.default:
                return torch.ones((), dtype=tensors[0].dtype).item()
            if func is aten.equal.default:
                return True
            if func is aten.nonzero.default:  # as if nothing were zero
                return torch.ones(tensors[0].shape, dtype=torch.bool, device="cpu").nonzero()
            args, kwargs = tree_map_only(
                Tensor, lambda each: each if each.is_meta else each.to("meta"), (args, kwargs)
            )
        made = func(*args, **kwargs)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._memory.meet(leaf)
        return made


class LikeCuda(TorchFunctionMode):
    """Chooses the operations that a CUDA device would be given, autocast's casts among them.

    Meta tensors know neither CUDA's fused attention nor any autocast.
    """

    LOWER = frozenset(
        "linear matmul mm bmm mv addmm addbmm baddbmm addmv addr chain_matmul einsum prelu conv1d "
        "conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d __matmul__ "
        "__rmatmul__ scaled_dot_product_attention".split()
    )
    FLOAT = frozenset(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ "
        "softplus layer_norm group_norm cosine_similarity nll_loss cross_entropy kl_div l1_loss "
        "smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
        "logsumexp interpolate prod softmax log_softmax cumprod cumsum norm sum".split()
    )

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self._autocast = autocast
        self.weight_copies: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self._autocast is not None and name in self.LOWER | self.FLOAT:
            dtype = self._autocast if name in self.LOWER else torch.float32
            args, kwargs = tree_map_only(
                Tensor, lambda tensor: self._cast(tensor, dtype), (args, kwargs)
            )
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        is_ours = tensor.is_floating_point() and tensor.dtype != torch.float64
        if not is_ours or tensor.dtype == dtype:
            return tensor
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and dtype == self._autocast:
            if id(tensor) not in self.weight_copies:
                self.weight_copies[id(tensor)] = tensor.to(dtype)
            return self.weight_copies[id(tensor)]
        return tensor.to(dtype)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention where it can be used, else the memory-efficient one; as CUDA chooses."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and query.shape[-1] == value.shape[-1]:
        flash: Any = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, -3) for x in (key, value))
    bias = None
    if attn_mask is not None:
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device="meta")
        bias = zeros if attn_mask.dtype == torch.bool else attn_mask.to(query)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    efficient: Any = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


class _Watch:
    """Hooks that tell which modules keep what."""

    def __init__(self, model: nn.Module, memory: _Memory) -> None:
        self.kept: dict[int, tuple[int, set[str]]] = {}
        self.inputs: dict[str, set[int]] = {}
        self.rows: dict[str, int] = {}
        self._own = memory.own
        self._alive: list[Tensor] = []  # so that no address is given to another tensor
        self._running: list[str] = []
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(self._before(name, module)),
                module.register_forward_hook(lambda *_: self._end_module(), always_call=True),
            ]

    def _before(self, name: str, module: nn.Module) -> Callable[..., None]:
        is_linear = isinstance(getattr(module, "weight", None), Tensor)

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._running.append(name)
            if is_linear and args and isinstance(args[0], Tensor) and args[0].ndim:
                x = args[0]
                self.inputs.setdefault(name, set()).add(_key(x))
                self.rows[name] = self.rows.get(name, 0) + x.numel() // max(1, x.shape[-1])

        return hook

    def _end_module(self) -> None:
        self._running.pop()

    def pack(self, tensor: Tensor) -> Tensor:
        """Called for everything that is kept for backward."""
        key = _key(tensor)
        if key not in self._own:
            self._alive.append(tensor)
            size = tensor.untyped_storage().nbytes()
            keeper = self._running[-1] if self._running else ""
            self.kept.setdefault(key, (size, set()))[1].add(keeper)
        return tensor

    def forget(self) -> None:
        """Let go of what only was to be recognised; backward frees it as it goes."""
        self._alive.clear()

    def end(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
