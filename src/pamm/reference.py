"""The paper in plain PyTorch, to be read beside its equations. Everything else is tested on this.

    draw           k rows of A, uniform without replacement         Algorithm 1, line 3
    assign         f(i) and alpha_i, by absolute cosine similarity  Lemma 1
    compress       C, f, alpha, with eps (eq. 3) and beta           section 3.1
    approx_matmul  O~ = beta C.T B~,  B~_j = sum_{f(i)=j} alpha_i B_i

Where the paper's text and its listing differ the text is followed: the *absolute* cosine is
maximised, eps is relative to the row's norm, and beta = b / (b - dropped) scales the result.
Three cases the paper leaves open: a generator stands for itself with alpha exactly 1, so that
eps = 0 keeps the generators alone, which is Uniform-CRS; a zero row has alpha 0 and counts as
kept; NaN and Inf are not filtered, because loss scalers look for them in the gradient.
"""

import torch
from jaxtyping import Float, Int64, Integer
from torch import Tensor

from pamm.types import Compressed, accumulation_dtype, assignment_dtype


def draw(tokens: int, k: int, generator: torch.Generator | None = None) -> Int64[Tensor, " k"]:
    """The rows to keep: k of ``tokens``, uniformly and without replacement."""
    return torch.randperm(tokens, generator=generator)[:k]


def assign(
    a: Float[Tensor, "tokens n"], c: Float[Tensor, "k n"]
) -> tuple[Int64[Tensor, " tokens"], Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """f(i) = argmax_j |csim(A_i, C_j)|, alpha_i = <A_i, C_f> / ||C_f||^2, and csim(A_i, C_f)^2.

    ||A_i|| is the same for every j, so the argmax needs only <A_i, C_j> / ||C_j||. Sums in fp32
    (fp64 for fp64 inputs).
    """
    a, c = (tensor.to(accumulation_dtype(tensor.dtype)) for tensor in (a, c))
    norm_c = c.norm(dim=1)
    inverse_c = torch.where(norm_c > 0, 1 / norm_c, 0)
    similarity = (a @ c.T) * inverse_c  # csim(A_i, C_j) * ||A_i||
    f = similarity.abs().argmax(dim=1)
    best = similarity.gather(1, f[:, None]).squeeze(1)
    norm_a = a.norm(dim=1)
    cosine_squared = torch.where(norm_a > 0, (best / norm_a) ** 2, 1)
    return f, best * inverse_c[f], cosine_squared


def compress(
    a: Float[Tensor, "tokens n"],
    index: Integer[Tensor, " k"],
    tolerance: float | None = None,
) -> Compressed:
    """Keep the rows ``index`` of A, and for every row the one that stands for it and its scale.

    A row is dropped, alpha_i = 0, where its stand-in is too far off: ||A_i - A~_i|| > eps ||A_i||,
    that is csim^2 < 1 - eps^2.
    """
    k, tokens = len(index), len(a)
    c = a[index]
    f, alpha, cosine_squared = assign(a, c) if k else _nothing(a)
    is_generator = torch.zeros(tokens, dtype=torch.bool, device=a.device)
    is_generator[index] = True
    f[index] = torch.arange(k, device=a.device)
    alpha[index] = torch.where((c == 0).all(dim=1), 0.0, 1.0).to(alpha)

    dropped = torch.zeros_like(is_generator)
    if tolerance is not None:
        # Written so that NaN compares as kept, and no rounding of csim can keep a row at eps = 0.
        too_far = cosine_squared < 1 - tolerance**2
        dropped = (too_far | (tolerance == 0)) & ~is_generator
    alpha = alpha.masked_fill(dropped, 0)
    kept = (tokens - dropped.sum()).clamp(min=1).float()
    beta = torch.full_like(kept, max(tokens, 1)) / kept
    return Compressed(c, f.to(assignment_dtype(k)), alpha.to(a.dtype), beta)


def approx_matmul(compressed: Compressed, b: Float[Tensor, "tokens m"]) -> Float[Tensor, "n m"]:
    """O~ = beta * C.T @ B~, the approximation of A.T @ B, with B~_j the alpha-weighted sum of rows.

    Sums in fp32 (fp64 for fp64 inputs); the result has B's dtype.
    """
    c, f, alpha, beta = compressed
    wide = accumulation_dtype(b.dtype)
    b_tilde = torch.zeros(len(c), b.shape[1], dtype=wide, device=b.device)
    b_tilde.index_add_(0, f.to(torch.int64), alpha.to(wide)[:, None] * b.to(wide))
    return (beta.to(wide) * (c.to(wide).T @ b_tilde)).to(b.dtype)


def _nothing(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulation_dtype(a.dtype)
    empty = a.new_zeros(len(a), dtype=wide)
    return empty.to(torch.int64), empty, empty
