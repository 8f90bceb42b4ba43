"""Small models, and measuring tools the tests share."""

import contextlib
import io
import runpy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import pamm
from pamm.nn import Pamm, is_pamm
from pamm.sharing import Group

NAMES = ("q_proj", "k_proj", "v_proj")
ROOT = Path(__file__).parents[1]


class Attention(nn.Module):
    """Self-attention with separate projections and dropout, as the tests' model of a model."""

    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        for name in (*NAMES, "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            getattr(self, name)(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for name in NAMES
        )
        p = self.dropout if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.o_proj(y.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Pre-norm block: the input of q, k and v is the norm's output, which nothing else keeps."""

    def __init__(self, width: int = 16, dropout: float = 0.0):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + nn.functional.dropout(
            self.mlp(self.mlp_norm(x)), self.attention.dropout, self.training
        )


class Model(nn.Module):
    """A stack of blocks on continuous inputs."""

    def __init__(self, width: int = 16, layers: int = 2, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def exact_config() -> pamm.PammConfig:
    """Every row is its own generator: PAMM's weight gradient is exact up to rounding."""
    return pamm.PammConfig("pamm", 1.0)


def pamm_layers(model: nn.Module) -> list[Pamm]:
    return [module for module in model.modules() if is_pamm(module)]


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """All tensors saved for backward inside the context."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def saved_bytes(saved: list[Tensor], parameters: list[Tensor]) -> int:
    """Bytes of the distinct storages, parameters left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in saved}
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in known)


@contextmanager
def counted_compressions(model_groups: list[Group]) -> Iterator[list[tuple[int, ...]]]:
    """The shape of every X compressed by these groups inside the context."""
    shapes: list[tuple[int, ...]] = []

    def counting(original: Callable[..., object]) -> Callable[..., object]:
        def compress(x: Tensor, draw: object) -> object:
            shapes.append(tuple(x.shape))
            return original(x, draw)

        return compress

    for group in model_groups:
        group.method.compress = counting(group.method.compress)  # type: ignore[method-assign]
    try:
        yield shapes
    finally:
        for group in model_groups:
            del group.method.compress


def tensor_with_finaliser(shape: tuple[int, ...]) -> tuple[Tensor, list[str]]:
    """A tensor, and a list that gets an entry when its *storage* is freed."""
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    freed: list[str] = []
    tensor = torch.from_numpy(array)
    weakref.finalize(array, freed.append, "freed")
    return tensor, freed


def strided(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape that lies in memory in one of several ways."""
    if layout == "transposed" and len(shape) > 1:
        return torch.randn(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    if layout == "sliced":
        return torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    if layout == "expanded" and len(shape) > 1:
        return torch.randn(1, *shape[1:], dtype=dtype).expand(shape)
    return torch.randn(shape, dtype=dtype)


def run_script(name: str, *options: str) -> str:
    """What an example or a benchmark prints, run in this process: in one of its own, importing the
    libraries takes longer than a tiny model does.
    """
    path, out = str(ROOT / name), io.StringIO()
    with (
        mock.patch("sys.argv", [path, *options]),
        contextlib.redirect_stdout(out),
        warnings.catch_warnings(action="ignore"),
    ):
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()
