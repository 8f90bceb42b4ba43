"""The one autograd Function: a linear layer whose weight gradient comes from a compressed input.

    y  = x W.T + bias          exact
    dx = dy W                  exact
    dbias = sum_i dy_i         exact
    dW ~ (X.T dy).T            from the state a compressor kept in place of X

Where X has another dtype than W, the layers that read X share one cast of it, and each casts its
own dx back, as autograd does for a cast in front of ``F.linear``.

Saved for backward: W and the state. A Function and not a pair of saved-tensor hooks, because hooks
would rebuild X in backward, a tensor of tokens times features, and take the whole product with it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pamm.compressors import Compressor


def even(x: Tensor) -> Tensor:
    """x as ``F.linear`` multiplies it: a copy, if its leading axes cannot be seen as one."""
    return x if x.ndim < 3 or x.is_contiguous() else x.reshape(-1, x.shape[-1]).view(x.shape)


class CompressedLinear(torch.autograd.Function):
    """``F.linear`` with a weight gradient from ``state``; apply through ``functional``."""

    # Not in two parts, with setup_context: ``apply`` would look up the signature of ``forward`` at
    # every call, which takes as long as launching two kernels.
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        cast: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        compressor: Compressor,
        *state: Tensor,
    ) -> Tensor:
        ctx.compressor, ctx.dtype = compressor, x.dtype
        ctx.is_column_major = x.ndim == 2 and x.stride() == (1, x.shape[0])
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *state)
        x = x if cast is None else cast
        if (read := even(x)) is x:
            return F.linear(x, weight, bias)
        # In steps, as F.linear does it for a weight with a gradient: here it sees one without.
        y = F.linear(read, weight)
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        weight, *state = ctx.saved_tensors
        wants_x, _, wants_weight, wants_bias = ctx.needs_input_grad[:4]
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = None
        if wants_x:
            # Column-major for such an x, as autograd does: its strides, and the last bits.
            grad_x = (weight.t() @ rows.t()).t() if ctx.is_column_major else rows @ weight
            grad_x = grad_x.to(ctx.dtype).reshape(*grad.shape[:-1], weight.shape[1])
        grad_weight = ctx.compressor.weight_grad(tuple(state), rows) if wants_weight else None
        grad_bias = grad.sum_to_size(grad.shape[-1]) if wants_bias else None
        return grad_x, None, grad_weight, grad_bias, None, *(None for _ in state)
