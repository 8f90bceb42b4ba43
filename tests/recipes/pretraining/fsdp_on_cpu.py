"""``pamm`` with FSDP2 between CPU processes, which Accelerate offers on accelerators only."""

from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState

from pamm.cli import main

_init = AcceleratorState.__init__


def _allow(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


AcceleratorState.__init__ = _allow  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
