"""torchtitan: an override for the q, k and v projections, separate or fused, of every block.

.. code-block:: bash

    torchtitan ... --override.imports 'pamm.integrations.torchtitan.qkv={"method": "pamm"}'

The keys are the fields of ``PammConfig``. For torchtitan 0.3, whose overrides replace parts of the
configuration before the model is built. Checkpoints and optimizers are those of the exact model.
FSDP, pipelines and torch.compile work as before; tensor parallelism, fp8 and LoRA are refused. A
run that resumes draws its rows from the first ones again.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.config.override import (  # pyright: ignore[reportMissingImports]
    derive,
    override,
)
from torchtitan.models.common.attention import (  # pyright: ignore[reportMissingImports]
    BaseQKVLinear,
    FusedQKVLinear,
    QKVLinear,
)
from torchtitan.models.common.linear import Linear  # pyright: ignore[reportMissingImports]

from pamm.compressors import compressor
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.nn import Pamm
from pamm.sharing import Group
from pamm.stream import Stream

_numbers = itertools.count()


@dataclass(kw_only=True, slots=True)
class PammQKV(QKVLinear.Config):
    """Three projections that share one compression of their input."""

    pamm: PammConfig
    name: str

    def build(self, **kwargs: Any) -> nn.Module:
        """The module, its layers converted."""
        return _converted(QKVLinear.Config.build(self, **kwargs), self.pamm, self.name)


@dataclass(kw_only=True, slots=True)
class PammFusedQKV(FusedQKVLinear.Config):
    """One fused projection that keeps a compressed input."""

    pamm: PammConfig
    name: str

    def build(self, **kwargs: Any) -> nn.Module:
        """The module, its layer converted."""
        return _converted(FusedQKVLinear.Config.build(self, **kwargs), self.pamm, self.name)


CONFIGS = {QKVLinear.Config: PammQKV, FusedQKVLinear.Config: PammFusedQKV}


@override(target=BaseQKVLinear.Config, description="PAMM on q, k and v")
def qkv(config: Any, **settings: Any) -> Any:
    """The configuration that takes the place of ``config``; ``settings`` are of ``PammConfig``.

    Raises:
        PammError: for settings or a kind of projection that PAMM does not know.
    """
    pamm, kind = PammConfig.from_dict(settings), CONFIGS.get(type(config))
    if pamm.recomputes:
        raise PammError(
            f"method {pamm.method!r} needs the norm that makes X, which an override does not see; "
            'choose another, such as {"method": "pamm"}.'
        )
    if kind is None:
        raise PammError(
            f"{type(config).__qualname__} is no kind of q, k and v projection that PAMM knows; "
            f"it knows {', '.join(each.__qualname__ for each in CONFIGS)}."
        )
    # Blocks have their own draws: they are met in the same order on every rank.
    return derive(config, kind, pamm=pamm, name=f"qkv.{next(_numbers)}")


class TitanPamm(Pamm):
    """Mixed into torchtitan's ``Linear``."""

    def parallelize(self, parallel_dims: Any) -> None:
        """As the layer does it.

        Raises:
            PammError: under tensor parallelism, where weight and X are no plain tensors.
        """
        if parallel_dims.tp > 1:
            raise PammError("PAMM does not know tensor parallelism; set its degree to 1.")
        super().parallelize(parallel_dims)  # type: ignore[misc]


def _converted(module: nn.Module, config: PammConfig, name: str) -> nn.Module:
    layers = dict(module.named_children())
    for child, layer in layers.items():
        if type(layer) is not Linear:
            raise PammError(
                f"{child} is {type(layer).__name__}, which computes its weight gradient in its own "
                "way; PAMM converts torchtitan's Linear. Leave that converter out for q, k and v."
            )
    # torchtitan builds on meta; the position of the stream needs a value, and moves along later.
    stream = Stream(config.seed, name, config.backend, torch.device("cpu"))
    method = compressor(config)
    method.prepare(next(iter(layers.values())).in_features, torch.device("cpu"))  # type: ignore[arg-type]
    group = Group(name, list(layers.values()), method, stream)
    for member, layer in enumerate(group.layers):
        TitanPamm.adopt(layer, group, member)
    return module
