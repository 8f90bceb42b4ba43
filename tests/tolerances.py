"""The only place with numerical tolerances: two policies, never mixed.

*Implementation error*: a fast path against the reference on the same inputs. At most twice the
error that the plain same-dtype computation makes against fp64, an error below one
rounding unit counting as one (it was luck). For fp64 itself there is no wider truth: a flat bound.

*Approximation error*: PAMM against the exact gradient. Statistical, on data of known structure.
"""

import torch
from torch import Tensor

IMPLEMENTATION_FACTOR = 2.0
FP64_ERROR = 1e-14

# Rows in 16 tight bundles (noise 5 % of a row's norm) and one generator for every 32 rows: nearly
# every bundle is hit, so the relative error of X.T @ G stays near the noise.
CLUSTERED_RELATIVE_ERROR = 0.2

# p-value under which a distribution is called wrong. The streams are seeded: no test is flaky.
SMALLEST_P = 1e-3


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth|| in fp64."""
    value, truth = value.double(), truth.double()
    return float((value - truth).norm() / truth.norm().clamp(min=1e-300))


def assert_implementation_error(value: Tensor, same_dtype: Tensor, truth: Tensor) -> None:
    """``value`` may be off from the fp64 ``truth`` twice as far as the plain ``same_dtype``."""
    unit = torch.finfo(value.dtype).eps
    allowed = IMPLEMENTATION_FACTOR * max(relative_error(same_dtype, truth), unit)
    if value.dtype == torch.float64:
        allowed = FP64_ERROR
    error = relative_error(value, truth)
    assert error <= allowed, f"implementation error {error:.3e}, allowed {allowed:.3e}"
