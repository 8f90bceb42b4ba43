"""Methods that keep a small state instead of X and later give an approximate X.T @ G from it.

Add a method: one file with a class that follows ``Compressor``, one line in ``_METHODS``, and its
name in ``pamm.config.METHODS``.
"""

from pamm.compressors.compact import CompAct
from pamm.compressors.exact import Exact
from pamm.compressors.pamm import Pamm
from pamm.compressors.protocol import Compressor, Memoryless, State
from pamm.compressors.recompute import Recompute
from pamm.compressors.sampled import Sampled
from pamm.compressors.subspace import Subspace
from pamm.compressors.uniform_crs import UniformCRS
from pamm.config import PammConfig

_METHODS = {
    "pamm": Pamm,
    "subspace": Subspace,
    "uniform_crs": UniformCRS,
    "compact": CompAct,
    "recompute": Recompute,
    "sampled": Sampled,
    "exact": Exact,
}

__all__ = [
    "CompAct",
    "Compressor",
    "Exact",
    "Memoryless",
    "Pamm",
    "Recompute",
    "Sampled",
    "State",
    "Subspace",
    "UniformCRS",
    "compressor",
]


def compressor(config: PammConfig) -> Compressor:
    """The compressor that ``config.method`` names."""
    return _METHODS[config.method](config)
