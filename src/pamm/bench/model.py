"""``pamm bench model``: whole training steps of LLaMA shapes, in a bare loop."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from pamm.bench.arms import inputs, make_arms
from pamm.bench.records import Record, environment
from pamm.bench.timing import Mark, interleave, peaks
from pamm.config import PammConfig
from pamm.errors import PammError

SEQUENCE = 256


@dataclasses.dataclass(frozen=True)
class Llama:
    """A LLaMA shape of the paper's experiments, and the sequences that one GPU sees in a step."""

    hidden: int
    ffn: int
    heads: int
    layers: int
    batch: int

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * SEQUENCE


SIZES = {
    "60M": Llama(512, 1376, 8, 8, 128),
    "350M": Llama(1024, 2736, 16, 24, 128),
    "1B": Llama(2048, 5461, 32, 24, 64),
    "7B": Llama(4096, 11008, 32, 32, 64),
    "tiny": Llama(64, 128, 4, 2, 4),
}


def resized(name: str, layers: int | None) -> Llama:
    """The size of this name, with another number of layers if given."""
    if name not in SIZES:
        raise PammError(f"model is {name!r}; choose one of {', '.join(SIZES)}.")
    return SIZES[name] if layers is None else dataclasses.replace(SIZES[name], layers=layers)


def build(size: Llama, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(  # attention is SDPA by default
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_attention_heads=size.heads,
        num_hidden_layers=size.layers,
        vocab_size=32_000,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
        dtype=dtype,
    )
    with torch.device(device):
        return nn.Module.to(LlamaForCausalLM(config), dtype)


class Steps:
    """One training step of an arm, in three phases."""

    def __init__(self, arm: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
        self._arm, self._optimizer, self._ids = arm, optimizer, ids

    def __call__(self, mark: Mark = lambda phase: None) -> None:
        loss = self._arm(input_ids=self._ids, labels=self._ids).loss
        mark("forward")
        loss.backward()
        mark("backward")
        self._optimizer.step()
        self._optimizer.zero_grad()
        mark("optimizer")


def bench_model(
    size_name: str,
    config: PammConfig,
    device: torch.device,
    names: tuple[str, ...],
    repeats: int,
    compiled: bool,
    layers: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Medians of forward, backward and optimizer of every arm, tokens/s and peak memory.

    All arms share their parameters and one AdamW. Weights in bf16 on CUDA, fp32 elsewhere.
    """
    size = resized(size_name, layers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = build(size, device, dtype).train()
    ids = torch.randint(0, 32_000, (size.batch, SEQUENCE), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    arms = make_arms(model, config, names)
    if compiled:
        for arm in arms.values():
            arm.compile()
    steps = {name: Steps(arm, optimizer, ids) for name, arm in arms.items()}

    memory: dict[str, dict[str, Any]] = {}
    with _variants(len(arms)) if compiled else nullcontext():
        for name, step in steps.items():
            memory[name] = dict(peaks(step, device))
            between()
        medians = interleave(steps, device, repeats, 2, between)
    return [
        {
            "benchmark": "model",
            "model": size_name,
            **dataclasses.asdict(size),
            "sequence": SEQUENCE,
            "tokens": size.tokens,
            "k": config.generators(size.tokens),
            "dtype": str(dtype).removeprefix("torch."),
            "compiled": compiled,
            "arm": name,
            **{f"{phase}_ms": value for phase, value in medians[name].items()},
            "tokens_per_s": 1e3 * size.tokens / medians[name]["total"],
            "x_bytes": inputs(name) * size.layers * size.tokens * size.hidden * dtype.itemsize,
            **memory[name],
            "repeats": repeats,
            **environment(device),
        }
        for name in names
    ]


def _variants(arms: int) -> AbstractContextManager[None]:
    """Room for every arm in the compiler, to which they are variants of one function: by default it
    runs those past a few uncompiled, and only warns."""
    return torch._dynamo.config.patch(  # type: ignore[no-any-return]
        recompile_limit=8 * arms, fail_on_recompile_limit_hit=True
    )
