"""The product of rows that ``pamm.sampling`` draws, or of all, in 8 bits: half the time of 16.

    G_c.T @ X_c  ~  u_g u_x  E(G_c / u_g).T @ E(X_c / u_x)

where E rounds to e4m3, 3 bits behind the first. Of independent rows that is noise of 4 % of their
sum; a draw's is several times as much. And a draw makes the rows of G more alike in size, since
its weights lengthen the short ones, which is what 8 bits need. The units keep all of G within
e4m3's reach, and of X what is no more than twice its largest number:

    u_x = 2 max_ij |x_ij| / 448
    u_g = max(max_i ||g_i||, (1 + 2 FLOOR) sum_i ||g_i|| / c) / 448

since a drawn row times its weight is no longer than it was, or than tau, and tau no more than the
second. Numbers more than 4.5 powers of ten below 448 are rounded more coarsely, and those 5.7 below
to 0: where one token has most of all sizes, that is what the others pay.

What lies in directions (``sampling.Whole``) has no noise, and is multiplied in its own dtype.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import ScalingType

from pamm import sampling
from pamm.errors import PammError
from pamm.types import accumulation_dtype

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
MARGIN = 2.0
"""A row of X less its part in the directions is no longer than it was, but one number of it may be
larger."""
ROWS = 128
"""Drawn tokens are filled up to a multiple of this. cuBLAS takes those of 16, and needs up to a
quarter less time for those of 128 (``benchmarks/fp8_sums.py``)."""


class Rows(NamedTuple):
    """What stands for X and for G, a column for each drawn token."""

    x: Float[Tensor, "padded_n rows"]
    g: Float[Tensor, "padded_m rows"]
    units: Float[Tensor, " 2"]
    """What a 1 of x and of g stands for."""


def is_served(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device multiplies numbers of 8 bits, and 16 are what it has of G anyway."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or torch.version.hip:
        return False
    # Not get_device_capability: torch.compile cannot look into that one.
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) >= (8, 9)


def largest(x: Float[Tensor, "tokens n"]) -> Float[Tensor, " tokens"]:
    """max_j |x_ij|, in fp32 (fp64 for fp64)."""
    return torch.linalg.vector_norm(x, torch.inf, dim=1, dtype=accumulation_dtype(x.dtype))


def units(
    size: Float[Tensor, " tokens"], most: Float[Tensor, " tokens"], c: int
) -> Float[Tensor, " 2"]:
    """u_x and u_g, of the sizes of G's rows and what ``largest`` found in X's."""
    weighted = torch.maximum(size.max(), (1 + 2 * sampling.FLOOR) * size.sum() / c)
    made = room_for_units(size)
    torch.stack((MARGIN * most.max(), weighted), out=made)
    return made.div_(LARGEST).clamp_(min=sampling.TINY)


def room_for_units(like: Tensor) -> Float[Tensor, " 2"]:
    """Two numbers 16 bytes apart: cuBLAS takes a scale from no other address."""
    return like.new_empty(2, 16 // like.itemsize)[:, 0]


def draw_with_units(
    size: Float[Tensor, " tokens"],
    c: int,
    offset: Float[Tensor, " 1"],
    most: Float[Tensor, " tokens"],
) -> tuple[Int64[Tensor, " c"], Float[Tensor, " c"], Float[Tensor, " 2"]]:
    """``sampling.draw``, and ``units``."""
    return *sampling.draw(size, c, offset), units(size, most, c)


def all_with_units(
    size: Float[Tensor, " tokens"], most: Float[Tensor, " tokens"]
) -> tuple[Int64[Tensor, " tokens"], Float[Tensor, " tokens"], Float[Tensor, " 2"]]:
    """Each token once, where there is nothing to draw."""
    index = torch.arange(len(size), device=size.device)
    return index, torch.ones_like(size), units(size, most, len(size))


def rows(
    x: Float[Tensor, "tokens n"],
    g: Float[Tensor, "tokens m"],
    index: Int64[Tensor, " c"],
    weight: Float[Tensor, " c"],
    units: Float[Tensor, " 2"],
    whole: sampling.Whole | None = None,
) -> Rows:
    """The drawn rows, times the weights on G's side, less what the directions have on X's."""
    wide = accumulation_dtype(x.dtype)
    rest = sampling.rest(x, index, whole).to(wide) / units[0]
    weighted = g[index].to(wide) * (weight / units[1])[:, None]
    return Rows(_columns(rest), _columns(weighted), units)


def product(rows: Rows, dtype: torch.dtype) -> Float[Tensor, "padded_m padded_n"]:
    """u_x u_g g @ x.T.

    Raises:
        PammError: if this GPU's libraries do not have it.
    """
    if rows.x.is_cuda:
        one, (u_x, u_g) = ScalingType.TensorWise, rows.units
        try:
            # Not the fast mode: on Hopper it loses a quarter of 16,384 numbers of one sign.
            return F.scaled_mm(
                rows.g, rows.x.T, u_g, one, u_x, one, output_dtype=dtype, use_fast_accum=False
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise PammError(
                f"this GPU cannot multiply drawn rows in 8 bits ({error}). Convert with "
                'PammConfig("sampled", ..., fp8=False).'
            ) from error
    return (rows.g.float() @ rows.x.float().T * rows.units.prod()).to(dtype)


def padded(rows: int) -> int:
    """So many or a few more, as the multiplication takes them."""
    return -(-rows // ROWS) * ROWS


def rounded(values: Tensor) -> Tensor:
    """The nearest of e4m3; what is beyond its reach becomes the last of it."""
    return values.clamp(-LARGEST, LARGEST).to(DTYPE)


def _columns(rows: Tensor) -> Tensor:
    c, n = rows.shape
    columns = F.pad(rows.T, (0, padded(c) - c, 0, sampling.padded(n) - n))
    return rounded(columns).contiguous()
