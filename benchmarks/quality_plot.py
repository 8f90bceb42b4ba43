"""Pictures of what benchmarks/quality.py and the prototypes before it gave.

python benchmarks/quality_plot.py benchmarks/results/h200 docs
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from pamm.analysis.plots import COLOURS, new_figure, plain_numbers

Runs = dict[str, list[dict[str, Any]]]


def read(path: Path, size: str) -> Runs:
    """The trainings of one size with the most steps any of them has, by arm."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = [r for r in records if r["run"].get("size", "60M") == size]
    steps = max(r["run"]["steps"] for r in records)
    arms: Runs = defaultdict(list)
    for record in records:
        if record["run"]["steps"] == steps:
            arms[record["run"]["arm"]].append(record)
    return arms


def rates(arms: Runs, output: Path) -> None:
    """Perplexity against the learning rate: is every arm at its best?"""
    figure, axes = new_figure(7, 4.5)
    for colour, (name, records) in zip(COLOURS, sorted(arms.items()), strict=False):
        points = sorted((r["run"]["lr"], r["perplexity"]) for r in records)
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
    axes.set(xscale="log", xlabel="learning rate", ylabel="validation perplexity")
    plain_numbers(axes.xaxis)
    axes.legend()
    figure.savefig(output, dpi=150)


def frontier(arms: Runs, output: Path) -> None:
    """Perplexity of each arm at its best rate, against the bytes it holds of what exact keeps."""
    figure, axes = new_figure(7, 4.5)
    best = {name: min(r["perplexity"] for r in records) for name, records in arms.items()}
    for colour, name in zip(COLOURS, sorted(arms), strict=False):
        record = arms[name][0]
        share = record["held_bytes"] / record["exact_bytes"] if record["exact_bytes"] else 1
        axes.plot(100 * share, best[name], "o", color=colour, label=name)
    if "exact" in best:
        axes.axhline(best["exact"], color="grey", lw=0.8)
    axes.set(xscale="log", xlabel="held, of all inputs X that were converted (%)")
    axes.set(ylabel="validation perplexity")
    plain_numbers(axes.xaxis)
    axes.legend()
    figure.savefig(output, dpi=150)


FAMILIES = {
    "what is left of some tokens added": lambda what: "what is left" in what,
    "some directions drawn anew": lambda what: "drawn anew" in what,
    "the same, a size for each token (the library's)": lambda what: "a size for each" in what,
}
"""Of the prototypes; the last one that is true of it names its family."""


def prototypes(path: Path, arms: Runs, output: Path) -> None:
    """Perplexity over exact's at rate 0.002 and the same seed, against what is held by q, k, v."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = [r for r in records if r.get("factor", 1) == 1 and "mlp" not in r["method"]]
    records = [r | {"at": (r["lr"], r.get("seed", 0))} for r in records if r["lr"] == 0.002]
    exact = {(r["run"]["lr"], r["run"].get("seed", 0)): r["perplexity"] for r in arms["exact"]}
    exact |= {r["at"]: r["perplexity"] for r in records if r["method"] == "exact"}
    figure, axes = new_figure(8, 5)
    for colour, (family, fits) in zip(COLOURS, FAMILIES.items(), strict=False):
        mine = [r for r in records if r["method"] != "exact" and r["at"] in exact]
        mine = [r for r in mine if fits(r["what"])]
        mine = [r for r in mine if family == [f for f, of in FAMILIES.items() if of(r["what"])][-1]]
        x = [100 * r["held_share"] for r in mine]
        y = [100 * (r["perplexity"] / exact[r["at"]] - 1) for r in mine]
        axes.plot(x, y, "o", color=colour, alpha=0.8, label=family)
    axes.axhline(1, color="grey", lw=0.8, ls="--")
    axes.axhline(0, color="grey", lw=0.8)
    axes.set(xscale="log", xlabel="held, of q, k and v's inputs X (%)")
    axes.set(ylabel="perplexity above exact's (%), same seed")
    plain_numbers(axes.xaxis)
    axes.legend()
    figure.savefig(output, dpi=150)


def main() -> None:
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    arms = read(folder / "quality.jsonl", "60M")
    rates(arms, output / "quality-rates.png")
    frontier(arms, output / "quality-frontier.png")
    prototypes(folder / "quality_prototypes.jsonl", arms, output / "quality-prototypes.png")


if __name__ == "__main__":
    main()
