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

import pamm
from pamm.analysis.plots import COLOURS, new_figure, png
from pamm.bench.model import SEQUENCE, SIZES
from pamm.bench.records import append, environment
from quality import DEVICE, Data, Training, wait

TURNS = 60
VALIDATIONS = 10
SEQUENCES = 512
"""Of a validation."""
TIMED_TURNS, TIMED_STEPS = 15, 4
"""Before the race; the median leaves out the turn that compiles."""


class Arm(Training):
    """One of the trainings, with its clock."""

    def __init__(self, run: dict[str, Any], data: Data, size: str) -> None:
        self.name: str = run["arm"]
        self._plain = run
        steps = TIMED_TURNS * TIMED_STEPS
        super().__init__({**run, "size": size, "batch": SIZES[size].batch, "steps": steps}, data)
        tensors = [*self.model.parameters(), *pamm.carried(self.model).values()]
        self._first = [(tensor, tensor.detach().cpu().clone()) for tensor in tensors]

    @torch.no_grad()
    def restart(self, steps: int) -> None:
        """From the first weights, with a schedule over these steps."""
        for tensor, value in self._first:
            tensor.copy_(value)
        self.begin(steps)
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []

    def advance(self, steps: int) -> float:
        """Train on; the seconds it took."""
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait()
        return time.perf_counter() - began

    def look(self) -> float:
        """The validation loss, a point of the curve."""
        loss = self.validate(SEQUENCES)
        self.curve.append({"step": self.done, "seconds": self.seconds, "loss": loss})
        return loss

    def record(self) -> dict[str, Any]:
        """What is written down."""
        return {
            "benchmark": "race", "run": self._plain, "size": self.run["size"],
            "tokens_per_step": self.sequences * SEQUENCE, "steps": self.steps,
            "step_ms": 1e3 * self.seconds / self.done, "seconds": self.seconds,
            "perplexity": math.exp(self.curve[-1]["loss"]), "curve": self.curve,
            **self.bytes, **environment(DEVICE),
        }  # fmt: skip


def race(arms: list[Arm], seconds: float) -> Iterator[str]:
    """Run it; yields lines of progress."""
    times = [[arm.advance(TIMED_STEPS) for arm in arms] for _ in range(TIMED_TURNS)]
    for arm, took in zip(arms, zip(*times, strict=True), strict=True):
        step = statistics.median(took) / TIMED_STEPS
        arm.restart(max(TURNS, round(seconds / step)))
        yield f"{arm.name}: {1e3 * step:.2f} ms a step, {arm.steps} steps"
    for turn in range(1, TURNS + 1):
        for arm in arms:
            arm.seconds += arm.advance(arm.steps * turn // TURNS - arm.done)
            if turn % (TURNS // VALIDATIONS) == 0:
                loss = arm.look()
                yield f"{arm.name}: step {arm.done}, {arm.seconds:.1f} s, loss {loss:.4f}"


def plot(records: list[dict[str, Any]]) -> bytes:
    """Each arm at the best of its rates: loss over seconds, and its perplexity against the first
    arm's with the same seed at the same second; and the rates that were tried, with one seed.
    """
    figure, (left, middle, right) = new_figure(14, 4.2, panels=3)
    arms = by_arm(records)
    first = best(next(iter(arms.values())))
    for (name, ours), colour in zip(arms.items(), COLOURS, strict=False):
        curves = best(ours)
        for seed, curve in curves.items():
            seconds = [point["seconds"] for point in curve]
            look = {"color": colour, "markersize": 3, "alpha": 0.8}
            look |= {"label": name} if seed == min(curves) else {}
            left.plot(seconds, [point["loss"] for point in curve], "o-", **look)
            if seed in first:
                above = [
                    100 * math.expm1(p["loss"] - _at(first[seed], p["seconds"])) for p in curve
                ]
                middle.plot(seconds, above, "o-", **look)
        tried = sorted((run["lr"], run["perplexity"]) for run in ours if run["seed"] == min(curves))
        right.plot(*zip(*tried, strict=True), "o-", color=colour, label=name)
    left.set_ylabel("validation loss, nats a token")
    middle.set_ylabel(f"perplexity against {next(iter(arms))}'s, %")
    middle.axhline(0, color="grey", linewidth=0.8)
    for axes in (left, middle):
        axes.set_xlabel("seconds of training steps")
    right.set_xlabel(f"learning rate (seed {min(first)})")
    right.set_ylabel("perplexity at the end")
    right.set_xscale("log")
    rates = sorted({run["lr"] for ours in arms.values() for run in ours})
    right.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
    right.minorticks_off()
    figure.legend(
        *left.get_legend_handles_labels(), frameon=False, ncols=3, loc="outside upper left"
    )
    return png(figure)


def by_arm(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs of each arm, by name: rate, seed, perplexity and curve."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        run = record["run"]
        arms.setdefault(run["arm"], []).append(
            {"lr": run["lr"], "seed": run.get("seed", 0)}
            | {key: record[key] for key in ("perplexity", "curve")}
        )
    return arms


def best(runs: list[dict[str, Any]]) -> dict[int, list[dict[str, float]]]:
    """Curves by seed, at the rate that was best with the first seed."""
    seed = min(run["seed"] for run in runs)
    first = [run for run in runs if run["seed"] == seed]
    rate = min(first, key=lambda run: run["perplexity"])["lr"]
    return {run["seed"]: run["curve"] for run in runs if run["lr"] == rate}


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
    if "then" in {key for run in runs for key in run}:
        parser.error(f"an arm of {options.arms} has 'then'; leave it out: the method stays")
    data = Data(options.tokens)
    arms = [Arm(run, data, options.size) for run in runs]
    with torch._dynamo.config.patch(
        recompile_limit=8 * len(arms), fail_on_recompile_limit_hit=True
    ):
        for line in race(arms, options.seconds):
            print(line, flush=True)
    append(options.results, [arm.record() for arm in arms])


if __name__ == "__main__":
    main()
