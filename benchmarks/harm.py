"""Which number of a gradient's quality foretells what it costs in perplexity?

    python benchmarks/harm.py measure STUDY.jsonl --tokens tokens --results harm.jsonl
    python benchmarks/harm.py plot harm.jsonl quality.jsonl docs/harm.png

``measure`` trains exactly for a while (the first exact line of a quality study, a third of its
steps), stops, and takes the gradients of q, k and v for the same batches from every setting of it.
``plot`` sets them against the perplexities that ``quality.py`` found. With a_t the approximate and
e_t the exact gradient of batch t, at the same weights:

    relative error   mean over t of ||a_t - e_t|| / ||e_t||
    1 - cosine       mean over t of 1 - <a_t, e_t> / (||a_t|| ||e_t||)
    lost             1 - <sum a, sum e> / ||sum e||^2: what never arrives, however long one waits
    noise            ||sum (a - e)||^2 / ||sum e||^2 - lost^2: what is left of the error in the sum
    update lost      the same as lost for sum a / sqrt(sum a^2), element by element: of Adam's step
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pamm
from pamm.analysis.plots import COLOURS, new_figure
from pamm.bench.model import SIZES
from pamm.bench.records import append, environment
from quality import DEVICE, Data, batch, build, convert, train

BATCHES = 16
WARM = 10  # passes in which a subspace learns its directions
NAMES = ("q_proj", "k_proj", "v_proj")
NUMBERS = ("relative error", "1 - cosine", "lost", "noise", "update lost")


def gradients(model: nn.Module, data: Data, rows: Tensor) -> Tensor:
    """Those of q, k and v for one batch, as one vector."""
    model.zero_grad()
    inputs, labels = batch(data.train, rows)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        model(input_ids=inputs, labels=labels.clone(), shift_labels=labels.clone()).loss.backward()
    weights = [p for name, p in model.named_parameters() if any(each in name for each in NAMES)]
    return torch.cat([p.grad.flatten().float() for p in weights if p.grad is not None])


def compare(pairs: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The numbers above, from (a_t, e_t) of several batches."""
    errors, cosines = [], []
    sums: dict[str, Any] = dict.fromkeys(("a", "e", "aa", "ee"), 0.0)
    for a, e in pairs:
        errors.append(float((a - e).norm() / e.norm()))
        cosines.append(float(torch.cosine_similarity(a, e, dim=0)))
        for key, value in (("a", a), ("e", e), ("aa", a * a), ("ee", e * e)):
            sums[key] = sums[key] + value
    a, e = sums["a"], sums["e"]
    lost = 1 - float(a @ e / (e @ e))
    update, exact = (sums[key] / (sums[2 * key].sqrt() + 1e-12) for key in "ae")
    return {
        "relative error": sum(errors) / len(errors),
        "1 - cosine": 1 - sum(cosines) / len(cosines),
        "lost": lost,
        "noise": max(0.0, float((a - e).square().sum() / e.square().sum()) - lost**2),
        "update lost": 1 - float(update @ exact / (exact @ exact)),
    }


def measure(study: Path, tokens: Path, results: Path) -> None:
    """One record for each setting of the study that converts something."""
    runs = [json.loads(line) for line in study.read_text().splitlines() if line.strip()]
    first = next(run for run in runs if "config" not in run)
    settings = {run["arm"]: run for run in runs if "config" in run and "mlp" not in run}
    data = Data(tokens)
    size, sequences = SIZES[first.get("size", "60M")], first.get("batch", 128)
    trained = train(first | {"steps": max(1, first["steps"] // 3)}, data)[1]
    weights = trained.state_dict()
    model = build(size, data.vocabulary, 0)
    model.load_state_dict({name.replace("_orig_mod.", ""): w for name, w in weights.items()})
    order = data.order(1, (WARM + BATCHES) * sequences).split(sequences)
    exact = [gradients(model, data, rows).cpu() for rows in order[WARM:]]
    for arm, run in settings.items():
        convert(model, run, sequences * 256)
        for rows in order[:WARM]:
            gradients(model, data, rows)
        made = (gradients(model, data, rows) for rows in order[WARM:])
        pairs = ((a, e.to(a.device)) for a, e in zip(made, exact, strict=True))
        record = {"benchmark": "harm", "arm": arm, "config": run["config"], **compare(pairs)}
        append(results, [record | environment(DEVICE)])
        pamm.revert(model)
        print(arm, {name: round(record[name], 3) for name in NUMBERS}, flush=True)


def plot(results: Path, quality: Path, output: Path) -> None:
    """Each number against the perplexity above exact's, both arms at their best rate."""
    best: dict[str, float] = {}
    for line in quality.read_text().splitlines():
        record = json.loads(line)
        if record["run"].get("size", "60M") == "60M":
            arm = record["run"]["arm"]
            best[arm] = min(best.get(arm, float("inf")), record["perplexity"])
    measured = [json.loads(line) for line in results.read_text().splitlines()]
    measured = [record for record in measured if record["arm"] in best]
    figure, _ = new_figure(15, 3.6)
    figure.clear()
    for place, number in enumerate(NUMBERS):
        axes = figure.add_subplot(1, len(NUMBERS), place + 1)
        for colour, record in zip(COLOURS, measured, strict=False):
            harm = 100 * (best[record["arm"]] / best["exact"] - 1)
            axes.plot(record[number], harm, "o", color=colour, label=record["arm"])
        axes.set(xlabel=number, xlim=(0, None))
        if place == 0:
            axes.set_ylabel("perplexity above exact's (%)")
            axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(output, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("study", type=Path)
    one.add_argument("--tokens", type=Path, default=Path("tokens"))
    one.add_argument("--results", type=Path, required=True)
    two = commands.add_parser("plot")
    for name in ("results", "quality", "output"):
        two.add_argument(name, type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.study, options.tokens, options.results)
    else:
        plot(options.results, options.quality, options.output)


if __name__ == "__main__":
    main()
