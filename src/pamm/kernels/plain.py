"""Fast plain PyTorch, for the CPU and for every device without a kernel of its own.

Equal to ``pamm.reference`` up to rounding. Works through the tokens in chunks, so that no
temporary grows with tokens times features: neither an fp32 copy of X or G nor the (tokens, k)
matrix of similarities.
"""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from pamm.types import Compressed, accumulation_dtype, assignment_dtype

# Elements of a temporary. On the CPU larger ones fall out of cache and are paged in anew at each
# call: index_add over 2 M fp32 elements took 1 ms in chunks of 1 M and 4 ms in chunks of 8 M.
_CHUNK = {"cpu": 1 << 20}
_CHUNK_ELSEWHERE = 1 << 26

# Up to here the product with a one-hot matrix beats index_add on the CPU; above, index_add wins
# (benchmarks/results/segment_sum_cpu.jsonl). Elsewhere index_add is slow and not deterministic.
_ONE_HOT_GENERATORS = 64


def compress(
    x: Float[Tensor, "tokens n"], index: Integer[Tensor, " k"], tolerance: float | None
) -> Compressed:
    """The twin of ``reference.compress``: same arguments, same result."""
    tokens, k = len(x), len(index)
    wide = accumulation_dtype(x.dtype)
    generators = x[index]
    c = generators.to(wide)
    norm = c.norm(dim=1)
    inverse = torch.where(norm > 0, 1 / norm, 0)
    # eps >= 1 admits every row, and at eps = 0 no row needs to be looked at but the generators.
    tested = tolerance is not None and 0 < tolerance < 1

    f = torch.zeros(tokens, dtype=torch.int64, device=x.device)
    alpha = torch.zeros(tokens, dtype=wide, device=x.device)
    dropped = torch.zeros(tokens, dtype=torch.bool, device=x.device) if tested else None
    if tolerance != 0:
        for rows in _chunks(x, width=max(x.shape[1], k)):
            part = x[rows].to(wide)
            similarity = (part @ c.T).mul_(inverse)
            torch.argmax(similarity.abs(), dim=1, out=f[rows])
            best = similarity.gather(1, f[rows, None]).squeeze(1)
            torch.mul(best, inverse[f[rows]], out=alpha[rows])
            if dropped is not None and tolerance is not None:
                norm_x = part.norm(dim=1)
                dropped[rows] = (norm_x > 0) & ((best / norm_x) ** 2 < 1 - tolerance**2)

    f[index] = torch.arange(k, device=x.device)
    alpha[index] = (c != 0).any(dim=1).to(wide)
    beta = torch.ones((), dtype=torch.float32, device=x.device)
    if tolerance == 0:
        beta *= max(tokens, 1) / max(k, 1)
    elif dropped is not None:
        dropped[index] = False
        alpha.masked_fill_(dropped, 0)
        beta = beta * max(tokens, 1) / (tokens - dropped.sum()).clamp(min=1)
    return Compressed(generators, f.to(assignment_dtype(k)), alpha.to(x.dtype), beta)


def segment_sum(
    assignment: Integer[Tensor, " tokens"],
    coefficients: Float[Tensor, " tokens"],
    b: Float[Tensor, "tokens m"],
    k: int,
) -> Float[Tensor, "k m"]:
    """B~_j = sum over the rows i with f(i) = j of alpha_i B_i, in fp32 (fp64 for fp64 inputs)."""
    wide = accumulation_dtype(b.dtype)
    total = torch.zeros(k, b.shape[1], dtype=wide, device=b.device)
    one_hot = b.device.type != "cpu" or k <= _ONE_HOT_GENERATORS
    for rows in _chunks(b, width=max(b.shape[1], k if one_hot else 1)):
        f = assignment[rows].to(torch.int64)
        alpha = coefficients[rows]
        if one_hot:
            total += _one_hot_product(f, alpha, b[rows], k, wide)
        else:
            total.index_add_(0, f, b[rows] * alpha.to(wide)[:, None])
    return total


def weight_grad(compressed: Compressed, b: Float[Tensor, "tokens m"]) -> Float[Tensor, "m n"]:
    """(beta C.T @ B~).T: the twin of ``reference.approx_matmul``, in ``nn.Linear``'s layout.

    B~ stays in fp32: in fp16 a sum over many tokens would overflow.
    """
    c, f, alpha, beta = compressed
    b_tilde = segment_sum(f, alpha, b, len(c)).mul_(beta)
    return (b_tilde.T @ c.to(b_tilde.dtype)).to(b.dtype)


def _one_hot_product(f: Tensor, alpha: Tensor, b: Tensor, k: int, wide: torch.dtype) -> Tensor:
    """P.T @ B with P[i, f(i)] = alpha_i."""
    if b.device.type == "cuda" and b.dtype != wide:
        p = torch.zeros(k, len(f), dtype=b.dtype, device=b.device)
        return torch.mm(p.scatter_(0, f[None], alpha.to(b.dtype)[None]), b, out_dtype=wide)
    p = torch.zeros(k, len(f), dtype=wide, device=b.device)
    return p.scatter_(0, f[None], alpha.to(wide)[None]) @ b.to(wide)


def _chunks(rows_of: Tensor, width: int) -> list[slice]:
    size = max(1, _CHUNK.get(rows_of.device.type, _CHUNK_ELSEWHERE) // max(width, 1))
    return [slice(start, start + size) for start in range(0, len(rows_of), size)]
