"""Which number of a gradient's quality foretells what it costs in perplexity?

    python benchmarks/harm.py measure STUDY.yaml --tokens tokens --results harm.jsonl
    python benchmarks/harm.py plot harm.jsonl STUDY_FOLDER docs/harm.png

``measure`` trains a 60M LLaMA exactly for a while (benchmarks/quality.py, which also makes the
tokens), stops, and takes the gradients of q, k and v for the same batches from every setting of a
study of ``pamm ablate``. ``plot`` sets them against what each cost in the study's trainings that
chose the rates. With a_t the approximate and e_t the exact gradient of batch t, at
the same weights:

    relative error   mean over t of ||a_t - e_t|| / ||e_t||
    1 - cosine       mean over t of 1 - <a_t, e_t> / (||a_t|| ||e_t||)
    lost             1 - <sum a, sum e> / ||sum e||^2: what never arrives, however long one waits
    noise            ||sum (a - e)||^2 / ||sum e||^2 - lost^2: what is left of the error in the sum
    update lost      the same as lost for sum a / sqrt(sum a^2), element by element: of Adam's step
    lost at once     mean over t of 1 - <a_t, e_t> / ||e_t||^2: ``pamm.fidelity``'s of a step
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pamm
from frontier import kind, percent_axis, points
from pamm.analysis.plots import COLOURS, new_figure, png
from pamm.bench.model import SIZES
from pamm.bench.records import append, environment
from pamm.recipes.studies.ablate import STUDY
from pamm.recipes.studies.study import Study
from quality import DEVICE, Data, batch, build, train

RUN = {"lr": 0.0015, "steps": 333}
SEQUENCES = 128
BATCHES = 16
WARM = 10  # passes in which a subspace learns its directions
NAMES = ("q_proj", "k_proj", "v_proj")
NUMBERS = ("relative error", "1 - cosine", "lost", "noise", "update lost")
ALONE = ("relative error", "1 - cosine", "update lost")


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
    errors, cosines, losses = [], [], []
    sums: dict[str, Any] = dict.fromkeys(("a", "e", "aa", "ee"), 0.0)
    for a, e in pairs:
        errors.append(float((a - e).norm() / e.norm()))
        cosines.append(float(torch.cosine_similarity(a, e, dim=0)))
        losses.append(1 - float(a @ e / (e @ e)))
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
        "lost at once": sum(losses) / len(losses),
    }


def measure(
    study: Study, data: Data, results: Path, size: str = "60M", sequences: int = SEQUENCES
) -> None:
    """One record for each configuration of the study, whatever its rate."""
    summary, trained = train(RUN | {"size": size, "batch": sequences}, data)
    print(f"trained exactly: perplexity {summary['perplexity']:.2f}", flush=True)
    weights = trained.state_dict()
    model = build(SIZES[size], data.vocabulary, 0)
    model.load_state_dict({name.replace("_orig_mod.", ""): w for name, w in weights.items()})
    needed = (WARM + BATCHES) * sequences
    order = data.order(1, needed)[:needed].split(sequences)
    exact = [gradients(model, data, rows).cpu() for rows in order[WARM:]]
    print(f"exact gradients of {BATCHES} batches taken", flush=True)
    measured: set[pamm.PammConfig] = set()
    for cell in study.cells:
        arm = study.run(Path(), cell, study.lrs[0], 0).arm
        config = arm.config
        if arm.is_exact or arm.targets != "attention" or config in measured:
            continue
        measured.add(config)
        print(f"{cell} ...", flush=True)
        pamm.convert(model, config)
        for rows in order[:WARM]:
            gradients(model, data, rows)
        made = (gradients(model, data, rows) for rows in order[WARM:])
        pairs = ((a, e.to(a.device)) for a, e in zip(made, exact, strict=True))
        record = {"benchmark": "harm", "cell": cell, "config": config.to_dict(), **compare(pairs)}
        append(results, [record | environment(DEVICE)])
        pamm.revert(model)
        print(cell, {name: round(record[name], 3) for name in NUMBERS}, flush=True)


def plot(records: list[dict[str, Any]], study: Study, folder: Path) -> bytes:
    """Three numbers alone against the perplexity above exact's; and two together, with that
    written beside them. A configuration that was trained with and without a smaller rate on q, k
    and v has two points, joined; the map has the better one.
    """
    figure, panels = new_figure(18, 4.8, panels=len(ALONE) + 1)
    trained = [point for point in points(study, folder) if not point.is_final]
    together = panels[-1]
    for place, record in enumerate(records):
        config = pamm.PammConfig.from_dict(record["config"])
        harm = [p.above for p in trained if kind(p.config, p.targets) == kind(config)]
        look = {"color": COLOURS[place % len(COLOURS)], "marker": "os^"[place // len(COLOURS)]}
        for axes, number in zip(panels, ALONE, strict=False):
            name = record["cell"].partition(", bytes")[0]
            axes.plot([record[number]] * len(harm), harm, ":", label=name, **look)
        where = record["relative error"], record["lost"]
        together.plot(*where, ls="", **look)
        beside = (6, -11 if place % 2 else 3)  # neighbours do not cover one another
        together.annotate(f"{min(harm):+.2g} %", where, beside, textcoords="offset points")
    for axes, number in zip(panels, ALONE, strict=False):
        percent_axis(axes)
        axes.set_ylabel("")
        axes.set_xlabel(number)
    percent_axis(panels[0])
    panels[0].set_xscale("log")
    together.set_xscale("log")
    together.margins(x=0.25)
    together.grid(alpha=0.25)
    together.set_xlabel("relative error")
    together.set_ylabel("lost")
    together.set_title("both together", fontsize="medium")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")
    return png(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("study", type=Path)
    one.add_argument("--tokens", type=Path, default=Path("tokens"))
    one.add_argument("--results", type=Path, required=True)
    two = commands.add_parser("plot")
    for name in ("results", "folder", "output"):
        two.add_argument(name, type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(Study.load(options.study), Data(options.tokens), options.results)
    else:
        records = [json.loads(line) for line in options.results.read_text().splitlines()]
        study = Study.load(options.folder / STUDY)
        options.output.write_bytes(plot(records, study, options.folder))


if __name__ == "__main__":
    main()
