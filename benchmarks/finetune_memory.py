"""Memory of the paper's fine-tunings, on random weights: RoBERTa-base, and Pixtral-12B with LoRA.

    python benchmarks/finetune_memory.py roberta RESULTS.jsonl        # 16 x 512 tokens, fp32
    python benchmarks/finetune_memory.py pixtral RESULTS.jsonl        # 80 GB
    python benchmarks/finetune_memory.py pixtral RESULTS.jsonl --tiny # to see it run

The paper counts X once for exact training, and the generators alone, once for each of q, k and v.
"Held" is measured with saved-tensor hooks: all that the group's layers keep for backward.

Pixtral: LoRA of rank 128 on q, k and v of the language model and of the vision tower, bf16
weights, PEFT's fp32 adapters, AdamW; first one image of 196 patches with 256 tokens of text, which
gives the paper's k (2 and 4 at 1/128), then eight. "lora_bf16" has bf16 adapters, so that X is kept
once and not three times in fp32. Arms take turns on one base model, so the times are of one process
and the peaks hold one arm's adapters and optimizer state.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import pamm
from pamm.analysis.memory import saved_bytes
from pamm.bench.records import Record, append, environment
from pamm.bench.timing import peaks
from pamm.recompute import group_layers

IMAGE_TOKEN = 10
LORA_ARMS = {
    "lora": None,
    "lora_bf16": None,
    "lora+pamm-1/128": "1/128",
    "lora+pamm-1/512": "1/512",
}
TEXT = {
    "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131_072,
}  # fmt: skip
TOWER = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "head_dim": 64, "image_size": 1024, "patch_size": 16,
}  # fmt: skip
TINY_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip
TINY_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "head_dim": 16, "image_size": 64, "patch_size": 16,
}  # fmt: skip


def generator_bytes(report: pamm.Report, tokens: int) -> int:
    """The paper's counting in its fine-tuning tables: generators, once for each layer."""
    return sum(
        len(group.out_features)
        * group.config.generators(tokens)
        * group.in_features
        * group.dtype.itemsize
        for group in report.converted
    )


def roberta(options: argparse.Namespace, device: torch.device) -> list[Record]:
    """Bytes held by all q/k/v inputs in one forward pass."""
    sizes = (
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        if options.tiny
        else {}
    )
    config = RobertaConfig(vocab_size=50_265, max_position_embeddings=514, **sizes)
    batch = options.batch[0] if options.batch else 16
    length = options.length or (64 if options.tiny else 512)
    with torch.device(device):
        model = RobertaForSequenceClassification(config).train()
    ids = torch.randint(10, 1000, (batch, length), device=device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    records = []
    for method, ratio in (
        ("exact", None),
        ("pamm", "1/128"),
        ("pamm", "1/256"),
        ("subspace", None),
    ):
        report = pamm.convert(model, pamm.PammConfig(method, ratio))  # type: ignore[arg-type]
        layers = group_layers(model)
        if method == "exact":
            pamm.revert(model)
        held = saved_bytes(model, layers, lambda: model(input_ids=ids, labels=labels))
        tokens = ids.numel()
        is_pamm = method == "pamm"
        records.append(
            {
                "model": "tiny" if options.tiny else "RoBERTa-base shape",
                "dtype": "float32",
                "batch": batch,
                "length": length,
                "method": method,
                "ratio": ratio,
                "generators": report.config.generators(tokens) if is_pamm else None,
                "held_bytes": sum(held.values()),
                "predicted_bytes": report.held_bytes(tokens),
                "paper_bytes": (
                    generator_bytes(report, tokens)
                    if is_pamm
                    else report.exact_bytes(tokens)
                    if method == "exact"
                    else None
                ),
            }
        )
        pamm.revert(model)
    return records


def pixtral(options: argparse.Namespace, device: torch.device) -> Iterator[Record]:
    """Bytes held in both towers, peak of a step, and tokens/s, of LoRA with and without PAMM."""
    text, tower = (TINY_TEXT, TINY_TOWER) if options.tiny else (TEXT, TOWER)
    image = options.image or (64 if options.tiny else 224)
    length = options.length or (16 if options.tiny else 256)
    rank = 4 if options.tiny else 128
    config = LlavaConfig(
        vision_config=PixtralVisionConfig(**tower),
        text_config=MistralConfig(**text, use_cache=False),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        base = LlavaForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    patches = (image // tower["patch_size"]) ** 2
    sizes = options.batch or (1, 8)
    batches = [_inputs(n, length, image, patches, text["vocab_size"], device) for n in sizes]
    common = {
        "model": "tiny" if options.tiny else "Pixtral-12B shape",
        "dtype": "bfloat16",
        "lora_rank": rank,
        "image": image,
    }
    for arm, ratio in LORA_ARMS.items():
        for measured in _lora_arm(base, batches, patches, rank, arm, options.repeats, device):
            yield {**common, "arm": arm, "ratio": ratio, **measured}


def _lora_arm(
    base: nn.Module,
    batches: list[dict[str, Tensor]],
    patches: int,
    rank: int,
    arm: str,
    repeats: int,
    device: torch.device,
) -> list[Record]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    ratio = LORA_ARMS[arm]
    wanted = LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "k_proj", "v_proj"])
    model: Any = get_peft_model(base, wanted, autocast_adapter_dtype=arm != "lora_bf16")  # type: ignore[arg-type]
    model.train()
    method = pamm.PammConfig("exact") if ratio is None else pamm.PammConfig("pamm", ratio)  # type: ignore[arg-type]
    towers = {
        "vision": pamm.convert(model, method, include="*vision_tower*"),
        "language": pamm.convert(model, method, exclude="*vision_tower*"),
    }
    layers = group_layers(model)
    if ratio is None:
        pamm.revert(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    records = []
    for inputs in batches:
        held = saved_bytes(model, layers, lambda inputs=inputs: model(**inputs))
        tokens = {
            "vision": len(inputs["input_ids"]) * patches,
            "language": inputs["input_ids"].numel(),
        }
        record: Record = {"batch": len(inputs["input_ids"])}
        for name, report in towers.items():
            b = tokens[name]
            record |= {
                f"{name}_tokens": b,
                f"{name}_held_bytes": sum(held[group.name] for group in report.converted),
                f"{name}_exact_bytes": report.exact_bytes(b),
                f"{name}_generators": None if ratio is None else report.config.generators(b),
                f"{name}_generator_bytes": None if ratio is None else generator_bytes(report, b),
            }

        def step(inputs: dict[str, Tensor] = inputs) -> None:
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        record |= dict(peaks(step, device))
        seconds = statistics.median(_seconds(step, device) for _ in range(repeats))
        record["step_ms"] = 1e3 * seconds
        record["language_tokens_per_s"] = tokens["language"] / seconds
        records.append(record)
    pamm.revert(model)
    model.unload()  # the base model is as it was
    return records


def _seconds(step: Any, device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _inputs(
    batch: int, length: int, image: int, patches: int, vocabulary: int, device: torch.device
) -> dict[str, Tensor]:
    """An image and ``length`` tokens of text in each row."""
    words = torch.randint(IMAGE_TOKEN + 1, vocabulary, (batch, length))
    ids = torch.cat([torch.full((batch, patches), IMAGE_TOKEN), words], dim=1).to(device)
    pixels = torch.randn(batch, 3, image, image, device=device, dtype=torch.bfloat16)
    sizes = torch.full((batch, 2), image, device=device)
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    return {"input_ids": ids, "pixel_values": pixels, "image_sizes": sizes, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=("roberta", "pixtral"))
    parser.add_argument("results", type=Path, help="append records to this file")
    parser.add_argument("--batch", type=int, nargs="+", help="rows in a step; pixtral: several")
    parser.add_argument("--length", type=int, help="tokens of text in a row")
    parser.add_argument("--image", type=int, help="pixels of each side, a multiple of 16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measure = roberta if options.model == "roberta" else pixtral
    for record in measure(options, device):
        record = {"benchmark": "finetune_memory", **record, **environment(device)}
        append(options.results, [record])
        print(record)


if __name__ == "__main__":
    main()
