"""Pictures of the prototypes before benchmarks/quality.py, and of its changes of method on the way.

python benchmarks/quality_plot.py benchmarks/results/h200 docs
"""

import json
import math
import re
import statistics
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from pamm.analysis.plots import COLOURS, new_figure, plain_numbers

FAMILIES = {
    "what is left of some tokens added": lambda what: "what is left" in what,
    "some directions drawn anew": lambda what: "drawn anew" in what,
    "the same, a size for each token (the library's)": lambda what: "a size for each" in what,
}
"""Of the prototypes; the last one that is true of it names its family."""


def prototypes(records: list[dict[str, Any]], trained: list[dict[str, Any]], output: Path) -> None:
    """Perplexity over exact's at rate 0.002 and the same seed, against what is held by q, k, v."""
    records = [r for r in records if r.get("factor", 1) == 1 and "mlp" not in r["method"]]
    records = [r | {"at": (r["lr"], r.get("seed", 0))} for r in records if r["lr"] == 0.002]
    runs = [(r["run"], r["perplexity"]) for r in trained if r["run"]["arm"] == "exact"]
    exact = {
        (r["lr"], r.get("seed", 0)): perplexity for r, perplexity in runs if r["steps"] == 1000
    }
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


def switches(trained: list[dict[str, Any]], output: Path) -> None:
    """Perplexity over exact's along the training, of runs whose method changes on the way.

    Beside the runs of one method with the rate, seed, steps and commit of those that change.
    """
    changing = [record for record in trained if "then" in record["run"]]
    like = {_setting(record) for record in changing}
    runs = [record for record in trained if _setting(record) in like]
    exact = next(record for record in runs if record["run"]["arm"] == "exact")
    figure, axes = new_figure(8, 5)
    for colour, record in zip(COLOURS, (r for r in runs if r is not exact), strict=False):
        loss = record["validation_loss"]
        gaps = [100 * math.expm1(loss[step] - exact["validation_loss"][step]) for step in loss]
        line = "-" if "then" in record["run"] else "--"
        axes.plot([int(step) for step in loss], gaps, f"{line}o", color=colour, ms=4,
                  label=record["run"]["arm"])  # fmt: skip
    axes.axhline(0, color="grey", lw=0.8)
    axes.set(xlabel="step", ylabel="validation perplexity above exact's (%)", ylim=(0, None))
    axes.legend()
    figure.savefig(output, dpi=150)


def directions(trained: list[dict[str, Any]], output: Path) -> None:
    """Perplexity over exact's of the same seed, against the share of tokens drawn."""
    exact = {
        r["run"].get("seed", 0): r["perplexity"] for r in trained if r["run"]["arm"] == "exact"
    }
    figure, axes = new_figure(8, 5)
    targets = {("config",): "q, k, v", ("mlp",): "gate, up", ("config", "mlp"): "all five"}
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for record in trained:
        run = record["run"]
        converted = tuple(key for key in ("config", "mlp") if key in run)
        if converted and "then" not in run:
            config = run[converted[0]]
            above = 100 * (record["perplexity"] / exact[run.get("seed", 0)] - 1)
            line = targets[converted], config.get("directions", 0)
            lines.setdefault(line, []).append((float(Fraction(config["ratio"])), above))
    for (target, count), found in sorted(lines.items(), key=lambda line: line[0][::-1]):
        colour = COLOURS[1 + [*targets.values()].index(target)]
        shares = sorted({share for share, _ in found})
        means = [statistics.mean(y for x, y in found if x == share) for share in shares]
        label = f"{target}, {count or 'no'} directions"
        style = {0: "s:", 16: "^:", 64: "o-", 128: "D--"}[count]
        axes.plot(shares, means, style, color=colour, mfc=colour if count else "white", label=label)
        axes.plot(*zip(*found, strict=True), ".", color=colour, ms=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1 / 8, 1 / 4, 1 / 3, 1 / 2], ["1/8", "1/4", "1/3", "1/2"])
    axes.axhline(0, color="grey", lw=0.8)
    axes.set(xlabel="share of the tokens drawn", ylabel="perplexity above exact's (%), same seed")
    axes.legend()
    figure.savefig(output, dpi=150)


def _setting(record: dict[str, Any]) -> tuple[Any, ...]:
    return (*(record["run"].get(key) for key in ("lr", "seed", "steps")), record["commit"])


def main() -> None:
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    records, trained, drawn = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("quality_prototypes.jsonl", "quality.jsonl", "quality_directions.jsonl")
    )
    prototypes(records, trained, output / "quality-prototypes.png")
    switches(trained, output / "quality-switches.png")
    directions(drawn, output / "quality-directions.png")
    runs = [(record, json.dumps(record["run"])) for record in drawn]
    plain = [r for r, run in runs if not re.search("directions|mlp|seed", run)]
    switches(plain, output / "quality-switches-sampled.png")


if __name__ == "__main__":
    main()
