"""Memory, measured: bytes that a group keeps for backward, and the peak of the whole process."""

import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(
    model: nn.Module, groups: Mapping[str, Iterable[str]], forward: Callable[[], object]
) -> dict[str, int]:
    """Bytes that each group of layers keeps from forward until backward.

    Counts whole storages, each once in a group: q, k and v that keep the same X count it once,
    and the same X cast three times counts three times. Parameters are left out, and so are
    autocast's copies of them: exact training keeps those as well, for the input's gradient.

    Looks at what these layers save, and not at what a checkpoint around them saves in their
    place: measure without activation checkpointing.

    Args:
        model: converted or not, in the mode to measure.
        groups: names of layers, by a name for the group (``pamm.recompute.group_layers``).
        forward: runs one forward pass of ``model``. Its graph is not needed afterwards.

    Returns:
        Bytes, by the name of the group; 0 for one that saved nothing.

    Examples:
        >>> model = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "k_proj": nn.Linear(8, 8)})
        >>> x = torch.zeros(100, 8)
        >>> saved_bytes(model, {"qk": list(model)}, lambda: [layer(x) for layer in model.values()])
        {'qk': 3200}
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[str, dict[int, Tensor]] = {name: {} for name in groups}
    with ExitStack() as stack:
        for group, names in groups.items():
            for name in names:
                layer = model.get_submodule(name)
                for handle in _Watch(layer, parameters, kept[group]).handles:
                    stack.callback(handle.remove)
        # Its weights are cast anew, inside the layers and not before: a watch must see it.
        torch.clear_autocast_cache()
        forward()
    return {
        group: sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
        for group, tensors in kept.items()
    }


class _Watch:
    """Collects what one layer saves, while its forward runs."""

    def __init__(self, layer: nn.Module, parameters: set[int], kept: dict[int, Tensor]) -> None:
        self._parameters = parameters
        self._own = [parameter.detach() for parameter in layer.parameters()]
        # By address; holding the tensor keeps the address from being given to another one.
        self._kept = kept
        # Not an attribute: it holds this object, and in a cycle all that was saved would stay.
        hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.handles = [
            layer.register_forward_pre_hook(lambda *_: hooks.__enter__()),
            layer.register_forward_hook(
                lambda *_: hooks.__exit__(None, None, None), always_call=True
            ),
        ]

    def _pack(self, tensor: Tensor) -> Tensor:
        # The tensor itself would hold its graph, and the graph holds what is returned and this
        # object: no garbage collector sees a cycle through the graph.
        detached = tensor.detach()
        address = tensor.untyped_storage().data_ptr()
        if address not in self._parameters and not self._is_cast_parameter(tensor):
            self._kept[address] = detached
        return detached

    def _is_cast_parameter(self, tensor: Tensor) -> bool:
        """Whether the storage is that of a parameter of the layer in another dtype.

        Told by content: a copy does not say what it was made from.
        """
        storage = tensor.untyped_storage()
        return any(
            own.dtype != tensor.dtype
            and own.numel() * tensor.element_size() == storage.nbytes()
            and torch.allclose(
                tensor.new_empty(0).set_(storage, 0, own.shape, own.stride()),
                own.to(tensor.dtype),
                rtol=0,
                atol=0,
                equal_nan=True,
            )
            for own in self._own
        )


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has used so far.

    On CUDA what tensors occupied on ``device``; elsewhere resident memory of the whole process,
    the interpreter and its libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # First choice on Linux, where getrusage begins with the peak of the process that started this
    # one; but not every kernel that calls itself Linux has the line.
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, else KiB
