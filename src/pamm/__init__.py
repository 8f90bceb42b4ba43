"""PAMM: attention's q, k and v projections train without keeping their input."""

from pamm import nn
from pamm.config import PammConfig
from pamm.errors import NothingToConvertError, PammError, PartialGroupError
from pamm.functional import approx_matmul, compress, linear
from pamm.optim import param_groups
from pamm.report import Report
from pamm.stream import Stream
from pamm.surgery import convert, revert, seek
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
    "compress",
    "convert",
    "linear",
    "nn",
    "param_groups",
    "revert",
    "seek",
]
