"""Pictures of benchmarks/quality.py's results: perplexity against rate, bytes held and time.

python benchmarks/quality_plot.py benchmarks/results/h200/quality.jsonl docs
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


def main() -> None:
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    arms = read(path, "60M")
    rates(arms, folder / "quality-rates.png")
    frontier(arms, folder / "quality-frontier.png")


if __name__ == "__main__":
    main()
