"""What compressing costs in quality and buys in time: LLaMA shapes from scratch, in a bare loop.

    python benchmarks/quality.py tokens TEXT.jsonl.xz... --validation V.jsonl.xz --output tokens
    python benchmarks/quality.py train STUDY.jsonl --tokens tokens --results quality.jsonl

A study is one JSON object a line, one training each:

    {"arm": "pamm", "config": {"method": "pamm", "ratio": "1/512"}, "lr": 0.0015, "steps": 1000}

"config" is a PammConfig, left out for plain exact training; "mlp" one more for gate and up;
"then" is {"at": 0.8, "config": ...}: another configuration, or exact training, from that share of
the steps on. "factor" scales the learning rate of q, k and v; "seed", "size" (60M), "batch" (128
sequences of 256 tokens). Trainings already in the results are skipped, so that the same command
goes on. On several GPUs start one process each, with --shard 0/4 and so on.

fp32 weights, bf16 autocast, AdamW (0.9, 0.95; weight decay 0.1), gradient norm 1, warm-up over a
tenth, cosine to a tenth. Blocks are compiled. Same seed, same weights and batches for all arms.
"""

import argparse
import json
import lzma
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pamm
from pamm.bench.model import SEQUENCE, SIZES, Llama
from pamm.bench.records import append, environment
from pamm.compressors import compressor

VALIDATION = 1024  # sequences
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def write_tokens(texts: list[Path], validation: Path, output: Path, tokenizer: Path | None) -> None:
    """Token numbers of all texts, as tensors; trains a BPE on the first texts if none is given."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def read(path: Path) -> list[str]:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            return [json.loads(line)["text"] for line in lines]

    def encoded(documents: list[str]) -> Tensor:
        pieces = []
        for start in range(0, len(documents), 512):
            for encoding in model.encode_batch_fast(documents[start : start + 512]):
                pieces.append(torch.tensor([*encoding.ids, 0], dtype=torch.int16))
        return torch.cat(pieces)

    output.mkdir(parents=True, exist_ok=True)
    documents = [text for path in texts for text in read(path)]
    if tokenizer is None:
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=16_000, special_tokens=["<eos>"], initial_alphabet=alphabet
        )
        model.train_from_iterator(documents[: len(documents) // 8], trainer)
    else:
        model = Tokenizer.from_file(str(tokenizer))
    model.save(str(output / "tokenizer.json"))
    torch.save(encoded(documents), output / "train.pt")
    torch.save(encoded(read(validation)), output / "validation.pt")


class Data:
    """Sequences of 256 tokens, on the device."""

    def __init__(self, folder: Path) -> None:
        self.train = torch.load(folder / "train.pt", weights_only=True).to(DEVICE)
        self.validation = torch.load(folder / "validation.pt", weights_only=True).to(DEVICE)
        self.vocabulary = 16_000

    def order(self, seed: int, sequences: int) -> Tensor:
        """Numbers of the sequences to train on; all come before one comes again."""
        number = len(self.train) // (SEQUENCE + 1)
        generator = torch.Generator().manual_seed(seed)
        epochs = range(-(-sequences // number))
        return torch.cat([torch.randperm(number, generator=generator) for _ in epochs]).to(DEVICE)


def batch(tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and labels of some sequences."""
    where = rows[:, None] * (SEQUENCE + 1) + torch.arange(SEQUENCE + 1, device=DEVICE)
    block = tokens[where].long()
    return block[:, :-1], block[:, 1:]


def build(size: Llama, vocabulary: int, seed: int) -> nn.Module:
    """The model in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_attention_heads=size.heads,
        num_hidden_layers=size.layers,
        vocab_size=vocabulary,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    with DEVICE:
        return LlamaForCausalLM(config).float().train()


def convert(model: nn.Module, run: dict[str, Any], tokens: int) -> dict[str, int]:
    """Convert as the run says; bytes that would be and that are held of the converted inputs."""
    exact = held = 0
    for key, target in (("config", "attention"), ("mlp", "mlp")):
        if key in run:
            config = pamm.PammConfig.from_dict({"seed": run.get("seed", 0), **run[key]})
            report = pamm.convert(model, config, targets=target)
            for group in report.converted:  # weights are fp32, but autocast makes X bf16
                exact += tokens * group.in_features * torch.bfloat16.itemsize
                if config.method != "recompute":
                    held += compressor(config).state_bytes(
                        tokens, group.in_features, torch.bfloat16
                    )
    return {"exact_bytes": exact, "held_bytes": held}


@torch.compile(dynamic=False)
def loss_of(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy((hidden.flatten(0, 1) @ head.T).float(), labels.flatten())


def rate(step: int, steps: int) -> float:
    """Of the peak: a tenth of the steps up, then a cosine to a tenth."""
    warm = 0.1 * steps
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


class Training:
    """The model of a run, its optimizer and its schedule over some steps."""

    def __init__(self, run: dict[str, Any], data: Data) -> None:
        self.run, self.data, self.seed = run, data, run.get("seed", 0)
        self.sequences = run.get("batch", 128)
        self.model = build(SIZES[run.get("size", "60M")], data.vocabulary, self.seed)
        self.bytes = self.prepare()
        self._backbone: Any = self.model.model
        for layer in self._backbone.layers:
            layer.compile(dynamic=False)
        self.begin(run["steps"])

    def prepare(self) -> dict[str, int]:
        """Make of the new model what the run is about; what it would hold and holds."""
        return convert(self.model, self.run, self.sequences * SEQUENCE)

    def begin(self, steps: int) -> None:
        """Plan these steps, from the first batch on."""
        groups = pamm.param_groups(
            self.model, lr=self.run["lr"], lr_factor=self.run.get("factor", 1.0), weight_decay=0.1
        )
        for group in groups:
            group["peak"] = group["lr"]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=DEVICE.type == "cuda")
        self.steps, self.done = steps, 0
        self._order = self.data.order(self.seed, steps * self.sequences)

    def step(self) -> Tensor:
        """The next one; its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * rate(self.done, self.steps)
        rows = self._order[self.done * self.sequences : (self.done + 1) * self.sequences]
        value = self._loss(self.data.train, rows)
        value.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.done += 1
        return value.detach()

    @torch.no_grad()
    def validate(self, most: int = VALIDATION) -> float:
        """Mean loss of so many sequences."""
        self.model.eval()
        numbers = torch.arange(min(most, 8 * self.sequences), device=DEVICE)
        parts = numbers.split(self.sequences)
        value = sum(float(self._loss(self.data.validation, rows)) for rows in parts) / len(parts)
        self.model.train()
        return value

    def _loss(self, tokens: Tensor, rows: Tensor) -> Tensor:
        inputs, labels = batch(tokens, rows)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            hidden = self._backbone(input_ids=inputs).last_hidden_state
            return loss_of(hidden, self.model.lm_head.weight, labels)  # type: ignore[union-attr]


def train(
    run: dict[str, Any], data: Data, made: type[Training] = Training
) -> tuple[dict[str, Any], nn.Module]:
    """One training: validation loss along the way and the time of a step; and the model."""
    steps, training = run["steps"], made(run, data)
    curve, history, tenths = {}, [], []
    tenth, began = max(1, steps // 10), time.perf_counter()
    then = run.get("then", {"at": math.inf})
    for step in range(steps):
        if step == round(min(1.0, then["at"]) * steps):
            pamm.revert(training.model)
            tokens = training.sequences * SEQUENCE
            convert(training.model, {"seed": training.seed, **then}, tokens)
        history.append(training.step())
        if (step + 1) % tenth == 0:
            wait()
            tenths.append(1e3 * (time.perf_counter() - began) / tenth)
            curve[step + 1] = training.validate()
            wait()
            began = time.perf_counter()
    loss_curve = torch.stack(history).float()
    each = max(1, steps // 100)
    record = {
        "perplexity": math.exp(curve[max(curve)]),
        "validation_loss": curve,
        "training_loss": [round(float(v), 4) for v in loss_curve.unfold(0, each, each).mean(1)],
        "step_ms": statistics.median(tenths[1:] or tenths),  # the first one compiles
        "step_ms_tenths": [round(ms, 3) for ms in tenths],
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0,
        **training.bytes,
        **environment(DEVICE),
    }
    return record, training.model


def wait() -> None:
    """For the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def add_train(commands: Any) -> None:
    """The command that trains a study."""
    command = commands.add_parser("train")
    command.add_argument("study", type=Path)
    command.add_argument("--tokens", type=Path, default=Path("tokens"))
    command.add_argument("--results", type=Path, required=True)
    command.add_argument("--shard", default="0/1", help="take every n-th training, from the i-th")
    command.add_argument("--limit", type=float, default=math.inf, help="begin none after (seconds)")


def train_study(options: argparse.Namespace, made: type[Training] = Training) -> None:
    """All trainings of a study that its results lack."""
    torch.set_float32_matmul_precision("high")
    known = options.results.read_text().splitlines() if options.results.exists() else []
    done = [json.loads(line)["run"] for line in known]
    number, of = map(int, options.shard.split("/"))
    runs = [json.loads(line) for line in options.study.read_text().splitlines() if line.strip()]
    data, began = Data(options.tokens), time.perf_counter()
    for run in [run for run in runs[number::of] if run not in done]:
        if time.perf_counter() - began > options.limit:
            break
        torch._dynamo.reset()
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        record = train(run, data, made)[0]
        append(options.results, [{"benchmark": "quality", "run": run, **record}])
        print(f"{record['perplexity']:8.3f}  {record['step_ms']:7.2f} ms  {run}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tokens = commands.add_parser("tokens")
    tokens.add_argument("texts", nargs="+", type=Path)
    tokens.add_argument("--validation", type=Path, required=True)
    tokens.add_argument("--output", type=Path, default=Path("tokens"))
    tokens.add_argument("--tokenizer", type=Path, help="instead of a new one")
    add_train(commands)
    options = parser.parse_args()
    if options.command == "tokens":
        write_tokens(options.texts, options.validation, options.output, options.tokenizer)
    else:
        train_study(options)


if __name__ == "__main__":
    main()
