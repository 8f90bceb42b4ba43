"""Which training is ahead after the same seconds? LLaMA shapes from scratch, in turns on one GPU.

    python benchmarks/race.py run ARMS.jsonl --tokens tokens --seconds 300 --results race.jsonl
    python benchmarks/race.py plot race.jsonl race.png

An arm is one JSON object a line, as a training of benchmarks/quality.py (which makes the tokens):

    {"arm": "half", "mlp": {"method": "sampled", "ratio": "1/2"}, "lr": 5e-4}

All have the same weights at first and see the same batches. Before the race some steps of each are
timed, and each plans as many steps, with its schedule over these, as fit into its seconds. Then
they take turns of a few seconds, so that a change of clocks meets all of them. Seconds are those of
the training steps, compiling and validation left out.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pamm
from pamm.analysis.plots import new_figure, png
from pamm.bench.model import SEQUENCE, SIZES
from pamm.bench.records import append, environment
from quality import DEVICE, Data, batch, build, convert, loss_of, rate

TURNS = 60
VALIDATIONS = 10
SEQUENCES = 512
"""Of the validation."""
TIMED = 4
"""Turns of ``TIMED`` steps before the race; the first compiles."""


class Arm:
    """One training."""

    def __init__(self, run: dict[str, Any], data: Data, size: str, sequences: int) -> None:
        self.run, self.data, self.size, self.sequences = run, data, size, sequences
        self.model = build(SIZES[size], data.vocabulary, run.get("seed", 0))
        self.bytes = convert(self.model, run, sequences * SEQUENCE)
        for layer in self.model.model.layers:  # type: ignore[union-attr]
            layer.compile(dynamic=False)
        tensors = dict(self.model.named_parameters()) | pamm.carried(self.model)
        self._first = [(tensor, tensor.detach().cpu().clone()) for tensor in tensors.values()]

    @torch.no_grad()
    def begin(self, steps: int) -> None:
        """From the first weights, with a schedule over these steps."""
        for tensor, value in self._first:
            tensor.copy_(value)
        self.steps, self.step, self.seconds = steps, 0, 0.0
        self.curve: list[dict[str, float]] = []
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1,
            fused=DEVICE.type == "cuda",
        )  # fmt: skip
        self.order = self.data.order(self.run.get("seed", 0), steps * self.sequences)

    def loss(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Of some sequences."""
        inputs, labels = batch(tokens, rows)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            hidden = self.model.model(input_ids=inputs).last_hidden_state  # type: ignore[operator, union-attr]
            return loss_of(hidden, self.model.lm_head.weight, labels)  # type: ignore[union-attr]

    def advance(self, steps: int) -> float:
        """Train on; the seconds it took."""
        _wait()
        began = time.perf_counter()
        for _ in range(min(steps, self.steps - self.step)):
            for group in self.optimizer.param_groups:
                group["lr"] = self.run["lr"] * rate(self.step, self.steps)
            rows = self.order[self.step * self.sequences : (self.step + 1) * self.sequences]
            self.loss(self.data.train, rows).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        _wait()
        took = time.perf_counter() - began
        self.seconds += took
        return took

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss; a point of the curve."""
        self.model.eval()
        parts = torch.arange(SEQUENCES, device=DEVICE).split(self.sequences)
        value = sum(float(self.loss(self.data.validation, part)) for part in parts) / len(parts)
        self.model.train()
        self.curve.append({"step": self.step, "seconds": self.seconds, "loss": value})
        return value

    def record(self) -> dict[str, Any]:
        """What is written down."""
        return {
            "benchmark": "race", "run": self.run, "size": self.size,
            "tokens_per_step": self.sequences * SEQUENCE, "steps": self.steps,
            "step_ms": 1e3 * self.seconds / self.step, "seconds": self.seconds,
            "perplexity": math.exp(self.curve[-1]["loss"]), "curve": self.curve,
            **self.bytes, **environment(DEVICE),
        }  # fmt: skip


def race(arms: list[Arm], seconds: float) -> Iterator[str]:
    """Run it; yields lines of progress."""
    for arm in arms:
        arm.begin(TIMED * (TURNS // 4))
    times: list[list[float]] = [[] for _ in arms]
    for _ in range(TURNS // 4):
        for arm, took in zip(arms, times, strict=True):
            took.append(arm.advance(TIMED) / TIMED)
    for arm, took in zip(arms, times, strict=True):
        step = statistics.median(took[1:])
        arm.begin(max(TURNS, round(seconds / step)))
        yield f"{arm.run['arm']}: {1e3 * step:.2f} ms a step, {arm.steps} steps"
    for turn in range(1, TURNS + 1):
        for arm in arms:
            arm.advance(round(arm.steps * turn / TURNS) - arm.step)
            if turn % (TURNS // VALIDATIONS) == 0:
                loss = arm.validate()
                yield f"{arm.run['arm']}: step {arm.step}, {arm.seconds:.1f} s, loss {loss:.4f}"


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def plot(records: list[dict[str, Any]]) -> bytes:
    """Loss over seconds, and each arm's perplexity against the first one's at the same second."""
    figure, (left, right) = new_figure(10.4, 4.2, panels=2)
    first = records[0]["curve"]
    for record in records:
        curve, name = record["curve"], record["run"]["arm"]
        seconds = [point["seconds"] for point in curve]
        left.plot(seconds, [point["loss"] for point in curve], "o-", markersize=3, label=name)
        above = [100 * math.expm1(p["loss"] - _at(first, p["seconds"])) for p in curve]
        right.plot(seconds, above, "o-", markersize=3, label=name)
    left.set_ylabel("validation loss, nats a token")
    right.set_ylabel(f"perplexity against {records[0]['run']['arm']}'s, %")
    right.axhline(0, color="grey", linewidth=0.8)
    for axes in (left, right):
        axes.set_xlabel("seconds of training steps")
    left.legend(frameon=False)
    return png(figure)


def _at(curve: list[dict[str, float]], seconds: float) -> float:
    """The loss at this time, on the line between the validations around it."""
    pairs = list(itertools.pairwise(curve))
    one, other = next((pair for pair in pairs if seconds <= pair[1]["seconds"]), pairs[-1])
    share = (seconds - one["seconds"]) / (other["seconds"] - one["seconds"])
    return one["loss"] + share * (other["loss"] - one["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("arms", type=Path)
    command.add_argument("--tokens", type=Path, default=Path("tokens"))
    command.add_argument("--size", default="1B", choices=[*SIZES])
    command.add_argument("--seconds", type=float, default=300.0, help="of training steps, each arm")
    command.add_argument("--results", type=Path, required=True)
    command = commands.add_parser("plot")
    command.add_argument("results", type=Path)
    command.add_argument("output", type=Path)
    options = parser.parse_args()
    if options.command == "plot":
        lines = options.results.read_text().splitlines()
        options.output.write_bytes(plot([json.loads(line) for line in lines]))
        return
    torch.set_float32_matmul_precision("high")
    runs = [json.loads(line) for line in options.arms.read_text().splitlines() if line.strip()]
    data, sequences = Data(options.tokens), SIZES[options.size].batch
    arms = [Arm(run, data, options.size, sequences) for run in runs]
    with torch._dynamo.config.patch(
        recompile_limit=8 * len(arms), fail_on_recompile_limit_hit=True
    ):
        for line in race(arms, options.seconds):
            print(line, flush=True)
    append(options.results, [arm.record() for arm in arms])


if __name__ == "__main__":
    main()
