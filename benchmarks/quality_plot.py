"""The picture of the prototypes before benchmarks/quality.py, against its exact trainings.

python benchmarks/quality_plot.py benchmarks/results/h200 docs
"""

import json
import sys
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


def main() -> None:
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    records, trained = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("quality_prototypes.jsonl", "quality.jsonl")
    )
    prototypes(records, trained, output / "quality-prototypes.png")


if __name__ == "__main__":
    main()
