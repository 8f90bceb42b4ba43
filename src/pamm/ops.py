"""The operations of PAMM as custom operators of PyTorch, on whichever backend serves the device.

    pamm::draw         k of b row numbers, from a position of a stream
    pamm::draw_next    the same, after moving the position on
    pamm::compress     C, f, alpha, beta of X and k row numbers: deterministic
    pamm::weight_grad  (beta C.T @ B~).T: deterministic
    pamm::project      X on the directions of a subspace, and those
    pamm::encode       codes of 4 and 2 bits of a matrix, with sizes and scales
    pamm::decode       the matrix they stand for
    pamm::refresh      the directions that a subspace carries, now and then brought up to date
    pamm::sample       rows that stand for those of X and G, some drawn by the size of G's
    pamm::sample_fp8   the product of such rows, which are rounded to 8 bits first

To torch.compile, checkpointing policies and profilers each is one opaque unit. None of them waits
for the device. All sums are taken in fp32 (fp64 for fp64), also under autocast.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, library

from pamm import fp8, sampling, subspace
from pamm.config import BACKENDS
from pamm.errors import PammError
from pamm.kernels import plain
from pamm.permutation import permutation_prefix
from pamm.types import Compressed, accumulation_dtype, assignment_dtype

# A private name of PyTorch's (2.13): one that drops the older vmap has no such tensors.
_functorch = getattr(torch._C, "_functorch", None)
_is_legacy_batched = getattr(_functorch, "is_legacy_batchedtensor", lambda _: False)

_LIBRARY = library.Library("pamm", "DEF")


def _op(schema: str, *tags: torch.Tag) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an op whose kernel, on every device, is the decorated function.

    Returns a function that calls the op, or its kernel where nobody could tell the difference: the
    way through the dispatcher and back into Python takes as long as the kernel's launch.
    """
    name = schema.partition("(")[0]

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        own = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
        _LIBRARY.define(schema, tags=(*own, *tags))
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        op = getattr(torch.ops.pamm, name).default

        @functools.wraps(kernel)
        def call(tensor: Tensor, *arguments: Any) -> Any:
            return (op if _is_observed(tensor) else kernel)(tensor, *arguments)

        return call

    return register


def _is_observed(tensor: Tensor) -> bool:
    """Whether something looks at the ops: a compiler, a profiler, a mode, a tensor subclass; or
    PyTorch's older vmap, of ``is_grads_batched``, which calls an op for each gradient.
    """
    return (
        torch.compiler.is_compiling()
        or torch.autograd.profiler._is_profiler_enabled
        or type(tensor) is not Tensor
        or tensor.device.type == "meta"
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or _is_legacy_batched(tensor)
    )


def _fake(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register what the op returns, in shapes and dtypes alone."""
    return library.register_fake(f"pamm::{name}", lib=_LIBRARY)


@_op("draw(Tensor state, int rank, SymInt tokens, SymInt k, str backend) -> Tensor")
def draw(state: Tensor, rank: int, tokens: int, k: int, backend: str) -> Tensor:
    """The first k values of the permutation of [0, tokens) that the state and rank name."""
    if _use_triton(state, backend):
        from pamm.kernels import draw as kernel

        return kernel.draw(state, rank, tokens, k, advance=False)
    return permutation_prefix(state, rank, tokens, k)


@_op("draw_next(Tensor(a!) state, int rank, SymInt tokens, SymInt k, str backend) -> Tensor")
def draw_next(state: Tensor, rank: int, tokens: int, k: int, backend: str) -> Tensor:
    """``draw`` at the next position."""
    if _use_triton(state, backend):
        from pamm.kernels import draw as kernel

        return kernel.draw(state, rank, tokens, k, advance=True)
    state[0] += 1
    return permutation_prefix(state, rank, tokens, k)


@_fake("draw")
@_fake("draw_next")
def _(state: Tensor, rank: int, tokens: int, k: int, backend: str) -> Tensor:
    return state.new_empty(k)


@_op("compress(Tensor x, Tensor index, float? tolerance, str backend) -> Tensor[]")
def _compress(x: Tensor, index: Tensor, tolerance: float | None, backend: str) -> list[Tensor]:
    if _use_triton(x, backend):
        from pamm.kernels import assign as kernel

        return list(kernel.compress(x, index, tolerance))
    with no_autocast(x):
        return list(plain.compress(x, index, tolerance))


@_fake("compress")
def _(x: Tensor, index: Tensor, tolerance: float | None, backend: str) -> list[Tensor]:
    (tokens, n), k = x.shape, index.shape[0]
    return [
        x.new_empty(k, n),
        x.new_empty(tokens, dtype=assignment_dtype(k)),
        x.new_empty(tokens),
        x.new_empty((), dtype=torch.float32),
    ]


def compress(
    x: Tensor, index: Tensor, tolerance: float | None = None, backend: str = "auto"
) -> Compressed:
    """``reference.compress``: the rows ``index`` of X (b, n), an assignment and coefficients."""
    return Compressed(*_compress(x, index, tolerance, backend))


@_op(
    "weight_grad(Tensor b, Tensor generators, Tensor assignment, Tensor coefficients, "
    "Tensor normalization, str backend) -> Tensor"
)
def _weight_grad(
    b: Tensor, c: Tensor, f: Tensor, alpha: Tensor, beta: Tensor, backend: str
) -> Tensor:
    if _use_triton(b, backend):
        from pamm.kernels import segment_sum as kernel

        return kernel.weight_grad(Compressed(c, f, alpha, beta), b)
    with no_autocast(b):
        return plain.weight_grad(Compressed(c, f, alpha, beta), b)


@_fake("weight_grad")
def _(b: Tensor, c: Tensor, f: Tensor, alpha: Tensor, beta: Tensor, backend: str) -> Tensor:
    return b.new_empty(b.shape[1], c.shape[1])


def weight_grad(compressed: Compressed, b: Tensor, backend: str = "auto") -> Tensor:
    """(beta C.T @ B~).T (m, n), about (A.T @ B).T: ``reference.approx_matmul``, transposed."""
    return _weight_grad(b, *compressed, backend)


@_op("project(Tensor x, Tensor carried, Tensor drawn) -> (Tensor, Tensor)")
def project(x: Tensor, carried: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """X Q (tokens, k) and Q (n, k) of ``subspace.basis``, in X's dtype.

    One op, since torch.compile (2.11, on a GPU) gave its own Q another dtype than it had said.
    """
    with no_autocast(x):
        basis = subspace.basis(carried.to(x.dtype), drawn)
        return x @ basis, basis


@_fake("project")
def _(x: Tensor, carried: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    k = carried.shape[1] + drawn.shape[0]
    return x.new_empty(x.shape[0], k), x.new_empty(x.shape[1], k)


@_op("encode(Tensor z, SymInt fine, str backend) -> (Tensor, Tensor, Tensor)")
def encode(z: Tensor, fine: int, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """``subspace.encode``: codes, sizes (tokens, 2) and scales (k,) of z (tokens, k)."""
    if _use_triton(z, backend):
        from pamm.kernels import codes as kernel

        return kernel.encode(z, fine)
    with no_autocast(z):
        return subspace.encode(z, fine)


@_fake("encode")
def _(z: Tensor, fine: int, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    tokens, k = z.shape
    codes = z.new_empty(tokens, subspace.code_bytes(fine, k), dtype=torch.uint8)
    return codes, z.new_empty(tokens, 2), z.new_empty(k, dtype=accumulation_dtype(z.dtype))


@_op("decode(Tensor codes, Tensor size, SymInt fine, SymInt k, str backend) -> Tensor")
def decode(codes: Tensor, size: Tensor, fine: int, k: int, backend: str) -> Tensor:
    """``subspace.decode``: (tokens, k) in the sizes' dtype, in units of the scale."""
    if _use_triton(size, backend):
        from pamm.kernels import codes as kernel

        return kernel.decode(codes, size, fine, k)
    return subspace.decode(codes, size, fine, k)


@_fake("decode")
def _(codes: Tensor, size: Tensor, fine: int, k: int, backend: str) -> Tensor:
    return size.new_empty(codes.shape[0], k)


@_op(
    "refresh(Tensor(a!) carried, Tensor(b!) passes, Tensor x) -> ()",
    torch.Tag.cudagraph_unsafe,
)
def refresh(carried: Tensor, passes: Tensor, x: Tensor) -> None:
    """``subspace.refreshed`` in place, in the first passes and then in each ``EVERY``-th.

    ``passes`` (1,) counts, on the CPU: the host decides, and does not wait for the device. So a
    graph of the device cannot hold this op: torch.compile leaves it out of its graphs.
    """
    number = int(passes)
    passes += 1
    if number >= subspace.FIRST and number % subspace.EVERY:
        return
    stride = subspace.stride(len(x), subspace.SAMPLE)
    rows = x[number % stride :: stride]
    if len(rows):
        with no_autocast(x):
            carried.copy_(subspace.refreshed(carried, rows))


@_fake("refresh")
def _(carried: Tensor, passes: Tensor, x: Tensor) -> None:
    return None


# g comes first: what observes a call is told by the first argument, and a vmap batches gradients.
@_op(
    "sample(Tensor g, Tensor x, Tensor size, SymInt c, Tensor offset, Tensor? z, Tensor? basis, "
    "Tensor? inner, str backend) -> (Tensor, Tensor)"
)
def _sample(
    g: Tensor,
    x: Tensor,
    size: Tensor,
    c: int,
    offset: Tensor,
    z: Tensor | None,
    basis: Tensor | None,
    inner: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    twin: Any = sampling
    if _use_triton(g, backend):
        from pamm.kernels import sample as twin
    whole = None if z is None else sampling.Whole(z, basis, inner)  # type: ignore[arg-type]
    return twin.rows(x, g, *twin.draw(size, c, offset), whole)


@_fake("sample")
def _(
    g: Tensor,
    x: Tensor,
    size: Tensor,
    c: int,
    offset: Tensor,
    z: Tensor | None,
    basis: Tensor | None,
    inner: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    rows = c + (0 if z is None else z.shape[1])
    n, m = x.shape[1], g.shape[1]
    return g.new_empty(rows, sampling.padded(n)), g.new_empty(rows, sampling.padded(m))


def sample(
    x: Tensor,
    g: Tensor,
    size: Tensor,
    c: int,
    offset: Tensor,
    whole: sampling.Whole | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``sampling.rows`` of X (tokens, n) and G (tokens, m), for c tokens that ``sampling.draw``
    drew by their sizes."""
    return _sample(g, x, size, c, offset, *(whole or (None, None, None)), backend)


@_op(
    "sample_fp8(Tensor g, Tensor x, Tensor size, Tensor most, SymInt c, Tensor offset, Tensor? z, "
    "Tensor? basis, Tensor? inner, str backend) -> Tensor"
)
def _sample_fp8(
    g: Tensor,
    x: Tensor,
    size: Tensor,
    most: Tensor,
    c: int,
    offset: Tensor,
    z: Tensor | None,
    basis: Tensor | None,
    inner: Tensor | None,
    backend: str,
) -> Tensor:
    whole = None if z is None else sampling.Whole(z, basis, inner)  # type: ignore[arg-type]
    twin: Any = fp8
    if _use_triton(g, backend):
        from pamm.kernels import fp8 as twin
    if c == len(size):
        drawn = fp8.all_with_units(size, most)
    else:
        drawn = twin.draw_with_units(size, c, offset, most)
    made = fp8.product(twin.rows(x, g, *drawn, whole), g.dtype)
    if whole is not None:
        made[: g.shape[1], : x.shape[1]].addmm_(whole.inner.T, whole.basis.T.to(g.dtype))
    return made


@_fake("sample_fp8")
def _(g: Tensor, x: Tensor, *_: Any) -> Tensor:
    return g.new_empty(sampling.padded(g.shape[1]), sampling.padded(x.shape[1]))


def sample_fp8(
    x: Tensor,
    g: Tensor,
    size: Tensor,
    most: Tensor,
    c: int,
    offset: Tensor,
    whole: sampling.Whole | None = None,
    backend: str = "auto",
) -> Tensor:
    """About G.T @ X (m, n): ``fp8.product`` of c tokens that ``sampling.draw`` drew by their sizes,
    or of all if c are all there are, and what ``whole`` has. ``most`` is what ``fp8.largest`` finds
    in X."""
    made = _sample_fp8(g, x, size, most, c, offset, *(whole or (None, None, None)), backend)
    return made[: g.shape[1], : x.shape[1]]  # type: ignore[no-any-return]


def no_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Sums in fp32 stay in fp32 inside this context."""
    device = tensor.device.type
    if device == "meta":
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _use_triton(tensor: Tensor, backend: str) -> bool:
    """Whether the Triton kernels serve this tensor; ``auto`` may be decided by PAMM_BACKEND."""
    if backend == "auto":
        backend = os.environ.get("PAMM_BACKEND", "auto")
        if backend not in BACKENDS:
            raise PammError(f"PAMM_BACKEND is {backend!r}; set one of {', '.join(BACKENDS)}.")
    if backend == "torch" or (backend == "auto" and not tensor.is_cuda):
        return False
    obstacle = _obstacle(tensor)
    if obstacle and backend == "triton":
        raise PammError(f"backend 'triton' cannot be used: {obstacle}. Choose 'auto' or 'torch'.")
    return obstacle is None


def _obstacle(tensor: Tensor) -> str | None:
    if not _has_triton():
        return "Triton is not installed"
    if not (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return f"the tensor is on {tensor.device.type}, not on a GPU"
    if tensor.dtype == torch.float64:
        return "its kernels take fp32, bf16 and fp16, not fp64"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
