"""What share of everything kept for backward the inputs of q, k and v are, and what PAMM leaves.

    python benchmarks/share_of_saved_bytes.py benchmarks/results/share_of_saved_bytes.jsonl

A small LLaMA on the CPU, backbone without the loss; distinct storages, parameters left out.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import pamm
from pamm.bench.records import append, environment

CPU = torch.device("cpu")
TOKENS, WIDTH, LAYERS = 1024, 256, 4


def build(dtype: torch.dtype, checkpointing: bool) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=688,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=256,
        use_cache=False,
    )
    model = nn.Module.to(LlamaModel(config), dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@contextlib.contextmanager
def saved_storages() -> Iterator[dict[int, Tensor]]:
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def saved_bytes(model: nn.Module, autocast: bool) -> int:
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    ids = torch.randint(256, (4, TOKENS // 4))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_storages() as kept:
        output = model(input_ids=ids)
    del output
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in parameters)


def main() -> None:
    records = []
    modes = {
        "bf16": (torch.bfloat16, False, False),
        "fp32 weights, bf16 autocast": (torch.float32, True, False),
        "fp32": (torch.float32, False, False),
        "bf16, full activation checkpointing": (torch.bfloat16, False, True),
    }
    for mode, (dtype, autocast, checkpointing) in modes.items():
        model = build(dtype, checkpointing)
        exact = saved_bytes(model, autocast)
        pamm.convert(model, pamm.PammConfig("pamm", 1 / 128))
        ours = saved_bytes(model, autocast)
        records.append(
            {
                "benchmark": "share_of_saved_bytes",
                "mode": mode,
                "exact_bytes": exact,
                "pamm_bytes": ours,
                "saved_share": 1 - ours / exact,
                **environment(CPU),
            }
        )
        print(f"{mode:40} {exact:12,} {ours:12,} {1 - ours / exact:.1%}")
    append(Path(sys.argv[1]), records)


if __name__ == "__main__":
    main()
