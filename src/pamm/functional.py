"""The functional layer: PAMM on any ``A.T @ B``, and a linear layer with a PAMM weight gradient."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pamm import ops
from pamm.autograd import CompressedLinear
from pamm.compressors import Compressor, State, compressor
from pamm.config import PammConfig, checked
from pamm.errors import PammError
from pamm.stream import Draw, Stream
from pamm.types import Compressed

_MODULES_ALONE = {
    "subspace": "carries directions from step to step",
    "sampled": "has the norm in front make X again",
    "recompute": "has the norm in front make X again",
}


@torch.no_grad()
def compress(
    a: Float[Tensor, "tokens n"], config: PammConfig | None = None, *, stream: Stream | None = None
) -> Compressed:
    """Keep k rows of A, and for every row an assignment and a coefficient.

    A~_i = alpha_i C_f(i), f(i) = argmax_j |csim(A_i, C_j)|, alpha_i = <A_i, C_f> / ||C_f||^2
    (PAMM, section 3.1). Not differentiable.

    Args:
        a: the matrix, any float dtype, any strides.
        config: ratio, tolerance and seed of method "pamm"; 1/512 if left out.
        stream: draws the generators, new ones at each call. Without one, the first draw of
            ``Stream(config.seed)``, the same at each call.

    Returns:
        ``Compressed`` with C (k, n) and alpha (tokens,) in A's dtype, f (tokens,) in uint8, int16
        or int32, and beta, an fp32 scalar. All sums are taken in fp32 (fp64 for fp64).

    Raises:
        PammError: if ``a`` is not a floating-point matrix, the config is for another method, or the
            stream is none.

    Examples:
        >>> a = torch.randn(1024, 64)
        >>> compress(a, PammConfig("pamm", "1/128")).generators.shape
        torch.Size([8, 64])
    """
    config = PammConfig("pamm") if config is None else checked(config)
    if config.method != "pamm":
        raise PammError(f"compress is for method 'pamm'; the config says {config.method!r}.")
    if not isinstance(a, Tensor) or a.ndim != 2 or not a.is_floating_point():
        raise PammError(
            f"compress takes a floating-point matrix of rows to compress; got {_kind(a)}. Flatten "
            "leading axes with a.reshape(-1, a.shape[-1])."
        )
    stream = Stream(config.seed, backend=config.backend) if stream is None else _checked(stream)
    index = stream.draw(len(a), config.generators(len(a)), a.device)
    return ops.compress(a, index, config.tolerance, config.backend)


@torch.no_grad()
def approx_matmul(compressed: Compressed, b: Float[Tensor, "tokens m"]) -> Float[Tensor, "n m"]:
    """O~ = beta C.T @ B~, about A.T @ B, where B~_j = sum_{f(i)=j} alpha_i B_i (PAMM, section 3.1).

    Takes b m + k n m multiplications in place of b n m. Sums in fp32 (fp64 for fp64), result in
    B's dtype. Not differentiable.

    Raises:
        PammError: if B has not one row for each row of A, or another dtype.

    Examples:
        >>> a, b = torch.randn(1024, 64), torch.randn(1024, 16)
        >>> approx_matmul(compress(a, PammConfig("pamm", 1.0)), b).allclose(a.T @ b, atol=1e-3)
        True
    """
    if not isinstance(compressed, Compressed):
        raise PammError(
            "approx_matmul takes what pamm.compress made of A, and then B; got "
            f"{_kind(compressed)} first."
        )
    tokens, dtype = len(compressed.assignment), compressed.generators.dtype
    if not isinstance(b, Tensor) or b.ndim != 2 or len(b) != tokens or b.dtype != dtype:
        raise PammError(
            f"approx_matmul takes a {dtype} matrix of {tokens} rows, one for each compressed row; "
            f"got {_kind(b)}."
        )
    return ops.weight_grad(compressed, b).T.contiguous()


def _kind(given: object) -> str:
    """What was given in place of a matrix."""
    is_tensor = isinstance(given, Tensor)
    return f"{given.dtype} of shape {tuple(given.shape)}" if is_tensor else type(given).__name__


def linear(
    x: Float[Tensor, "*batch n"],
    weight: Float[Tensor, "m n"],
    bias: Float[Tensor, " m"] | None = None,
    *,
    config: PammConfig,
    stream: Stream,
) -> Float[Tensor, "*batch m"]:
    """y = x W.T + bias, with dW from a compressed x (PAMM, algorithms 2 and 3).

    y, dx and dbias are exact, bit for bit those of ``F.linear``. Saves W and the state of
    ``config.method``, not x. Follows autocast. Where W needs no gradient, or gradients are off, it
    is plain ``F.linear``: nothing is drawn and nothing is saved. Double backward is not supported.

    Args:
        x: input of any rank from 1.
        weight: W, as in ``nn.Linear``.
        bias: optional.
        config: method, ratio and tolerance.
        stream: draws the generators; keep one for the whole training run.

    Raises:
        PammError: if config or stream is none, for a method that needs the module that makes x, or
            for an x that has no rows of as many floating-point numbers as W has columns.

    Examples:
        >>> x, weight = torch.randn(2, 128, 64), torch.randn(32, 64, requires_grad=True)
        >>> y = linear(x, weight, config=PammConfig("pamm", "1/16"), stream=Stream())
        >>> y.sum().backward()
        >>> weight.grad.shape
        torch.Size([32, 64])
    """
    checked(config)
    _checked(stream)
    if config.method in _MODULES_ALONE:
        raise PammError(
            f"method {config.method!r} {_MODULES_ALONE[config.method]}, which a function cannot. "
            "Convert a model that holds the layer with pamm.convert."
        )
    is_tensor = isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0
    if not is_tensor or x.shape[-1] != weight.shape[-1]:
        raise PammError(
            f"linear takes floating-point rows of {weight.shape[-1]} features, as weight has; got "
            f"{_kind(x)}."
        )
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    method = compressor(config)
    x, (weight, bias) = x.to(autocast_dtype(x)), cast_weights_like_autocast(weight, bias)
    state = compress_rows(method, x, stream.draw)
    return linear_from_state(x, x, weight, bias, method, state)


def _checked(stream: object) -> Stream:
    if not isinstance(stream, Stream):
        raise PammError(f"stream is {stream!r}; give a pamm.Stream, one for the whole training.")
    return stream


def cast_weights_like_autocast(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What autocast does to these arguments of ``F.linear``: the output dtype is the same."""
    weight = weight.to(autocast_dtype(weight))
    return weight, None if bias is None else bias.to(autocast_dtype(bias))


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that ``F.linear`` would compute this argument in: its own, or autocast's."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return tensor.dtype if tensor.dtype == torch.float64 else torch.get_autocast_dtype(device)


@torch.no_grad()
def compress_rows(
    method: Compressor, x: Float[Tensor, "*batch n"], draw: Draw, advance: bool = True
) -> State:
    """The state of X with its leading axes flattened; ``advance`` if a new forward pass begins."""
    rows = x.reshape(-1, x.shape[-1])
    if advance:
        method.advance(rows)
    return method.compress(rows, draw)


def linear_from_state(
    x: Float[Tensor, "*batch n"],
    cast: Float[Tensor, "*batch n"],
    weight: Float[Tensor, "m n"],
    bias: Float[Tensor, " m"] | None,
    method: Compressor,
    state: State,
) -> Float[Tensor, "*batch m"]:
    """The linear layer, its weight gradient taken from a state that ``method`` made of x.

    ``cast`` is x in the dtype of the weight: x itself, or made of it without a gradient.
    """
    other = None if cast is x else cast
    if x.ndim != 2 and x.is_contiguous():
        # As F.linear does itself. The Function then returns a tensor of its own: of a view it made,
        # autograd would forbid changes in place.
        other = None if other is None else other.view(-1, x.shape[-1])
        y = CompressedLinear.apply(x.view(-1, x.shape[-1]), other, weight, bias, method, *state)
        return y.view(*x.shape[:-1], weight.shape[0])  # of no tokens -1 could be anything
    return CompressedLinear.apply(x, other, weight, bias, method, *state)
