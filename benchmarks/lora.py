"""LoRA on q, k and v of an 8B LLaMA: peak memory and tokens/s of PEFT's LoRA and its rivals.

    python benchmarks/lora.py benchmarks/results/h200/lora.jsonl        # 80 GB, 3 minutes
    python benchmarks/lora.py lora.jsonl --tiny                         # to see it run

Llama-3-8B's shape with random bf16 weights, PEFT's defaults (r = 8), a bare loop with AdamW. All
arms share the base weights and take turns; first without, then with gradient checkpointing.

    lora          PEFT as it is: fp32 adapters, so X is kept three times in fp32
    lora_bf16     adapters in bf16: X is kept once
    lora_velora   PEFT's own compression of the inputs of lora_A, with its defaults
    lora_exact    pamm with method "exact": fp32 adapters share X in bf16, exact gradient
    lora_pamm     pamm, in the paper's form
    lora_recompute   pamm with method "recompute": X is made again in backward, exact gradient
    lora_sampled     pamm's default: X is made again, the gradient is from some of the tokens
    lora_bf16_recompute   adapters in bf16, and X is made again
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, VeloraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import pamm
from pamm.bench.model import Steps
from pamm.bench.records import Record, append, environment
from pamm.bench.timing import interleave, peaks

CONVERTED = {
    "lora_exact": "exact",
    "lora_pamm": "pamm",
    "lora_recompute": "recompute",
    "lora_sampled": "sampled",
    "lora_bf16_recompute": "recompute",
}
ARMS = ("lora", "lora_bf16", "lora_velora", *CONVERTED)
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def build(shape: dict[str, Any], sequence: int, device: torch.device) -> nn.Module:
    """The base model, made where it will run."""
    config = LlamaConfig(**shape, max_position_embeddings=sequence, use_cache=False)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def make_arm(
    base: nn.Module, name: str, ratio: str, dropout: float
) -> tuple[nn.Module, pamm.Report | None]:
    """A copy of ``base`` with its very Parameters, and adapters of its own."""
    shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    config = LoraConfig(
        r=8,
        target_modules=["q_proj", "k_proj", "v_proj"],
        lora_dropout=dropout,
        velora_config=VeloraConfig() if name == "lora_velora" else None,
    )
    torch.manual_seed(0)
    arm = get_peft_model(
        copy.deepcopy(base, shared), config, autocast_adapter_dtype="bf16" not in name
    ).train()
    if name not in CONVERTED:
        return arm, None
    ratio_of = ratio if name == "lora_pamm" else None
    return arm, pamm.convert(arm, pamm.PammConfig(CONVERTED[name], ratio_of))


def measure(
    arms: dict[str, nn.Module],
    ids: torch.Tensor,
    repeats: int,
) -> dict[str, Record]:
    """Medians and peaks of a training step of every arm."""
    device = ids.device
    steps = {}
    for name, arm in arms.items():
        trained = [parameter for parameter in arm.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
        steps[name] = Steps(arm, optimizer, ids)
    memory = {name: dict(peaks(step, device)) for name, step in steps.items()}
    medians = interleave(steps, device, repeats, warmup=1)
    return {
        name: {
            **{f"{phase}_ms": value for phase, value in medians[name].items()},
            "tokens_per_s": 1e3 * ids.numel() / medians[name]["total"],
            **memory[name],
        }
        for name in arms
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="append records to this file")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--ratio", default="1/128", help="of generators to tokens")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--tiny", action="store_true", help="a small model and 2 x 64 tokens")
    options = parser.parse_args()
    if options.tiny:
        options.sequence = 64
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = TINY if options.tiny else LLAMA_8B
    torch.manual_seed(0)
    base = build(shape, options.sequence, device)
    made = {name: make_arm(base, name, options.ratio, options.dropout) for name in options.arms}
    arms = {name: arm for name, (arm, _) in made.items()}
    ids = torch.randint(shape["vocab_size"], (options.batch, options.sequence), device=device)
    for checkpointing in (False, True):
        if checkpointing:
            for arm in arms.values():
                arm.gradient_checkpointing_enable({"use_reentrant": False})
        measured = measure(arms, ids, options.repeats)
        first = measured[options.arms[0]]
        for name, record in measured.items():
            report = made[name][1]
            append(
                options.results,
                [
                    {
                        "benchmark": "lora",
                        "model": "tiny" if options.tiny else "LLaMA-8B shape",
                        **shape,
                        "batch": options.batch,
                        "sequence": options.sequence,
                        "dropout": options.dropout,
                        "gradient_checkpointing": checkpointing,
                        "arm": name,
                        "ratio": options.ratio if name == "lora_pamm" else None,
                        "adapter_inputs_held_bytes": report and report.held_bytes(ids.numel()),
                        "adapter_inputs_exact_bytes": report and report.exact_bytes(ids.numel()),
                        **record,
                        "repeats": options.repeats,
                        "peft": peft.__version__,
                        **environment(device),
                    }
                ],
            )
            speed = record["tokens_per_s"]
            peak = record.get("peak_allocated_bytes", 0) / 2**30
            print(
                f"checkpointing {checkpointing!s:5} {name:19} {speed:10,.0f} tokens/s "
                f"({speed / first['tokens_per_s']:.3f}) peak {peak:.3f} GiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
