"""PAMM: attention's q, k and v projections train without keeping their input."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pamm import fidelity, nn, padding
    from pamm.config import PammConfig
    from pamm.errors import NothingToConvertError, PammError, PartialGroupError
    from pamm.functional import approx_matmul, compress, linear
    from pamm.optim import param_groups
    from pamm.report import Report
    from pamm.resume import carried, restore_carried, seek
    from pamm.stream import Stream
    from pamm.surgery import convert, revert
    from pamm.types import Compressed

__version__ = "0.1.0"

__all__ = [
    "Compressed",
    "NothingToConvertError",
    "PammConfig",
    "PammError",
    "PartialGroupError",
    "Report",
    "Stream",
    "approx_matmul",
    "carried",
    "compress",
    "convert",
    "fidelity",
    "linear",
    "nn",
    "padding",
    "param_groups",
    "restore_carried",
    "revert",
    "seek",
]

# Names load when first used, so that `pamm --help` does not wait seconds for torch.
_HOMES = {
    "Compressed": "types",
    "NothingToConvertError": "errors",
    "PammConfig": "config",
    "PammError": "errors",
    "PartialGroupError": "errors",
    "Report": "report",
    "Stream": "stream",
    "approx_matmul": "functional",
    "carried": "resume",
    "compress": "functional",
    "convert": "surgery",
    "linear": "functional",
    "param_groups": "optim",
    "restore_carried": "resume",
    "revert": "surgery",
    "seek": "resume",
}
_MODULES = ("fidelity", "nn", "padding")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"pamm.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'pamm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pamm.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
