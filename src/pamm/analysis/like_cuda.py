"""On ``meta`` tensors, the operations that a CUDA device would be given.

Meta tensors know neither fused attention, nor dropout masks of one byte, nor any autocast. What
each of them keeps for backward differs from what the plain operations keep.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class LikeCuda(TorchFunctionMode):
    """While it is entered, functions do what they would do on CUDA.

    Args:
        autocast: the dtype that CUDA's autocast computes in; ``None`` is without.
    """

    LOWER = frozenset(
        {
            *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "einsum"),
            *("addmm", "addbmm", "baddbmm", "addmv", "addr", "chain_matmul", "prelu"),
            *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d"),
            *("conv_transpose3d", "scaled_dot_product_attention"),
        }
    )
    FLOAT = frozenset(
        {
            *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
            *("reciprocal", "rsqrt", "sinh", "tan", "pow", "__pow__", "softplus", "layer_norm"),
            *("group_norm", "cosine_similarity", "nll_loss", "cross_entropy", "kl_div", "l1_loss"),
            *("smooth_l1_loss", "huber_loss", "mse_loss", "binary_cross_entropy_with_logits"),
            *("dist", "pdist", "cdist", "renorm", "logsumexp", "interpolate", "prod", "softmax"),
            *("log_softmax", "cumprod", "cumsum", "norm", "sum"),
        }
    )
    """Computed in fp32 whatever comes in; both lists are those of PyTorch's documentation."""

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
        if attn_mask.requires_grad and not attn_mask.is_meta:  # zeros in place of T5's positions
            attn_mask = query.new_empty(attn_mask.shape, dtype=attn_mask.dtype).requires_grad_()
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device="meta")
        bias = zeros if attn_mask.dtype == torch.bool else attn_mask.to(query)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    efficient: Any = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input
