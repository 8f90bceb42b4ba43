"""The part of torchtitan 0.3's interface that our override uses, where torchtitan is not installed.

Configurations that build their modules, the two kinds of q, k and v projections, and overrides:
with the names, fields and signatures of torchtitan, and nothing of its sharding.
"""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn


class Module(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self, **kwargs: Any) -> Any:
            return self._owner(config=dataclasses.replace(self), **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in vars(cls):
            cls.Config._owner = cls

    def parallelize(self, parallel_dims: Any) -> None:
        for child in self.children():
            child.parallelize(parallel_dims)  # type: ignore[operator]


class Linear(nn.Linear, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int
        out_features: int
        bias: bool = False

    def __init__(self, config: Any) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias)


class BaseQKVLinear(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        head_dim: int

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim


class QKVLinear(BaseQKVLinear):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseQKVLinear.Config):
        wq: Linear.Config
        wkv: Linear.Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.wq, self.wk, self.wv = (each.build() for each in (config.wq, config.wkv, config.wkv))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))


class FusedQKVLinear(BaseQKVLinear):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseQKVLinear.Config):
        n_heads: int
        n_kv_heads: int
        wqkv: Linear.Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.wqkv = config.wqkv.build()
        self.heads = [config.n_heads, config.n_kv_heads, config.n_kv_heads]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(self.wqkv(x).unflatten(-1, (-1, self.head_dim)), self.heads, -2)


def override(*, target: type, description: str = "") -> Any:
    assert issubclass(target, Module.Config), description
    return lambda factory: factory


def derive(source: Any, target_cls: Any, **deltas: Any) -> Any:
    names = {field.name for field in dataclasses.fields(source)}
    shared = names & {field.name for field in dataclasses.fields(target_cls)}
    return target_cls(**{name: getattr(source, name) for name in shared} | deltas)


@contextmanager
def installed() -> Iterator[None]:
    """Inside, ``import torchtitan`` finds this; afterwards nothing of it is left."""
    parts = {
        "torchtitan.config.override": (override, derive),
        "torchtitan.models.common.attention": (BaseQKVLinear, QKVLinear, FusedQKVLinear),
        "torchtitan.models.common.linear": (Linear,),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in parts.items():
            steps = name.split(".")
            for length in range(1, len(steps) + 1):
                path = ".".join(steps[:length])
                patch.setitem(sys.modules, path, ModuleType(path))
            vars(sys.modules[name]).update({each.__name__: each for each in contents})
        yield
        sys.modules.pop("pamm.integrations.torchtitan", None)
