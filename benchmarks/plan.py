"""What ``pamm plan`` predicts, against what a training step on a GPU takes.

    python benchmarks/plan.py benchmarks/results/h200/plan.jsonl

Bytes kept for backward: ``memory_allocated`` after forward less before it. Peak: of the third
step, when gradients are fresh and AdamW's states are there. LLaMA and BERT, random weights.
"""

import contextlib
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, LlamaConfig, PretrainedConfig

import pamm
from pamm.analysis.meta_model import PRECISIONS, Source, checkpoint
from pamm.analysis.plan import plan
from pamm.bench.records import append, environment

DEVICE = torch.device("cuda")
RATIO = 1 / 512


@dataclasses.dataclass(frozen=True)
class Case:
    config: PretrainedConfig
    dtype: str
    batch: int
    seq: int
    checkpointing: bool = False


def llama(hidden: int, inner: int, heads: int, layers: int, **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        vocab_size=32_000,
        architectures=["LlamaForCausalLM"],
        **changes,
    )


MEDIUM = llama(1024, 2736, 16, 24)
CASES = (
    Case(MEDIUM, "bf16", 16, 512),
    Case(MEDIUM, "bf16-amp", 8, 512),
    Case(MEDIUM, "bf16", 32, 512, checkpointing=True),
    Case(llama(2048, 5461, 32, 8, num_key_value_heads=8), "bf16", 8, 1024),
    Case(BertConfig(architectures=["BertForSequenceClassification"]), "bf16-amp", 64, 128),
)


def measure(folder: str, case: Case, convert: bool) -> tuple[int, int]:
    """Bytes kept for backward and peak, of one training step."""
    how = PRECISIONS[case.dtype]
    source = Source.load(folder)
    model = source.build(how.weights, DEVICE)
    if convert:
        pamm.convert(model, pamm.PammConfig("pamm", RATIO))
    if case.checkpointing:
        checkpoint(model, how, simulated=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(1, 1000, (case.batch, case.seq), device=DEVICE)
    labels = ids if "CausalLM" in type(model).__name__ else torch.zeros_like(ids[:, 0])
    autocast: Any = contextlib.nullcontext()
    saved = 0
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if how.autocast is not None:
            autocast = torch.autocast("cuda", how.autocast)
        with autocast:
            loss = model(input_ids=ids, labels=labels).loss
        saved = torch.cuda.memory_allocated() - before
        loss.backward()
        optimizer.step()
        del loss
    return saved, torch.cuda.max_memory_allocated()


def main() -> None:
    records = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            case.config.save_pretrained(folder)
            arguments = {"batch": case.batch, "seq": case.seq, "dtype": case.dtype}
            config = pamm.PammConfig("pamm", RATIO)
            found = plan(folder, config=config, checkpointing=case.checkpointing, **arguments)  # type: ignore[arg-type]
            for arm, predicted in (("exact", found.exact), ("pamm", found.converted)):
                saved, peak = measure(folder, case, arm == "pamm")
                torch.cuda.empty_cache()
                record = {
                    "benchmark": "plan",
                    "model": found.model,
                    "parameters": found.exact.weights // PRECISIONS[case.dtype].weights.itemsize,
                    **arguments,
                    "checkpointing": case.checkpointing,
                    "arm": arm,
                    "saved_predicted": predicted.saved,
                    "saved_measured": saved,
                    "saved_ratio": predicted.saved / saved,
                    "peak_predicted": predicted.peak,
                    "peak_measured": peak,
                    "peak_ratio": predicted.peak / peak,
                    **environment(DEVICE),
                }
                records.append(record)
                print(
                    f"{found.model} {case.dtype} {case.batch}x{case.seq} "
                    f"{'checkpointing ' * case.checkpointing}{arm}: predicted / measured "
                    f"saved {record['saved_ratio']:.3f}, peak {record['peak_ratio']:.3f}"
                )
    append(Path(sys.argv[1]), records)


if __name__ == "__main__":
    main()
