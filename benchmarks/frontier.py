"""The frontier of studies: perplexity against the bytes that are held, and against GPU time.

    python benchmarks/frontier.py docs STUDY_FOLDER... --speeds speed.jsonl race-1b.jsonl

Each training is set against exact training of the same study, length and seed. Filled: final
trainings, with the standard deviation over seeds. Hollow: the first seed's shorter training at the
best rate. Time is that of whole compiled steps by ``pamm bench model``, or in a race (race.py), of
the studies' own shape and of larger ones, where PAMM pays more; the perplexities are the studies'
in all.
``recompute`` is not trained: its gradients are exact's.
"""

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.transforms import Bbox

from pamm.analysis.plots import COLOURS, new_figure, png
from pamm.bench.arms import arm_config
from pamm.config import PammConfig
from pamm.recipes.studies.ablate import STUDY
from pamm.recipes.studies.study import Study

SHAPES = ("60M", "1B", "7B")
NOTHING = 0.05  # %: where what holds nothing of X is drawn
PERPLEXITIES = (0, 1, 2, 5, 10, 20, 50, 100)
OFFSETS = [(9, 0), (9, 9), (9, -9), (9, 18), (9, -18), (0, 11), (0, -18), (30, 27), (30, -30)]
"""Of names from their points, in the order of preference."""
METHODS = ("recompute", "pamm", "subspace", "sampled", "uniform_crs", "compact")


Kind = tuple[str, float, int, bool, str]


class Point(NamedTuple):
    """A way of training, against exact training of the same length."""

    name: str
    config: PammConfig
    held: float
    """% of X's bytes."""
    above: float
    """% of perplexity above exact's."""
    spread: float
    """Standard deviation of that over seeds: each against exact training with the same one."""
    is_final: bool
    lr_factor: float
    targets: str = "attention"


def points(study: Study, folder: Path) -> list[Point]:
    """All cells but exact's, short and final."""
    found = []
    for is_final in (False, True):
        exact = _trained(study, folder, _exact(study), is_final)
        for name in study.cells:
            arm = study.run(folder, name, study.lrs[0], study.seeds[0]).arm
            config = arm.config
            results = _trained(study, folder, name, is_final)
            seeds = [seed for seed in results if seed in exact]
            if config.method == "exact" or not seeds:
                continue
            x_bytes = exact[seeds[0]].predicted_bytes
            values = [100 * (results[s].perplexity / exact[s].perplexity - 1) for s in seeds]
            above = statistics.mean(values)
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            one = results[seeds[0]]
            held = 100 * one.predicted_bytes / x_bytes
            factor, targets = one.lr_factor, arm.targets
            found.append(Point(name, config, held, above, spread, is_final, factor, targets))
    return found


def slope(study: Study, folder: Path) -> float | None:
    """d ln perplexity / d ln steps of exact training, between the short and the final trainings."""
    short, final = (
        [*_trained(study, folder, _exact(study), is_final).values()] for is_final in (False, True)
    )
    if not final:
        return None
    ratio = statistics.mean(each.perplexity for each in final) / short[0].perplexity
    return math.log(ratio) / math.log(final[0].steps / short[0].steps)


def _exact(study: Study) -> str:
    return next(name for name, values in study.cells.items() if values == {"method": "exact"})


def _trained(study: Study, folder: Path, cell: str, is_final: bool) -> dict[int, Any]:
    """Results of the final trainings, or of the best short one, by seed; none that diverged."""
    runs = study.final(folder, cell) if is_final else study.tuning(folder, cell)
    found = [(run.config.seed, run.result) for run in runs if run.result and run.result.perplexity]
    # Short ones are all of one seed: the last of them stays.
    best_last = sorted(found, key=lambda each: -each[1].perplexity)  # type: ignore[operator]
    return dict(best_last)


def kind(config: PammConfig, targets: str = "attention") -> Kind:
    """What a setting's time depends on."""
    return config.method, config.ratio, config.directions or 0, bool(config.fp8), targets


def step_times(records: list[dict[str, Any]], shape: str) -> dict[Kind, float]:
    """Of each kind, the compiled step's time over exact's of the same run, in %."""
    case = ("model", shape, True)
    keys = ("benchmark", "model", "compiled")
    ours = [r for r in records if tuple(r.get(key) for key in keys) == case]
    exact = {r["commit"]: r["total_ms"] for r in ours if r["arm"] == "exact"}
    times = {}
    for record in ours:
        (arm, _, mlp), commit = record["arm"].partition("+"), record["commit"]
        own, targets = (mlp, "mlp") if arm == "exact" and mlp else (arm, "attention")
        is_one = arm == "exact" or not mlp
        if is_one and own.partition(":")[0] in METHODS and commit in exact:
            times[kind(arm_config(own), targets)] = 100 * record["total_ms"] / exact[commit]
    return race_times(records, shape) | times


def race_times(records: list[dict[str, Any]], shape: str) -> dict[Kind, float]:
    """The same of races, whose arms are compiled too and take turns: medians over all of them."""
    steps: dict[Kind | None, list[float]] = {}
    for record in records:
        if record["benchmark"] != "race" or record["size"] != shape:
            continue
        targets = {"config": "attention", "mlp": "mlp"}
        found = [
            kind(PammConfig.from_dict(record["run"][key]), target)
            for key, target in targets.items()
            if key in record["run"]
        ]
        if len(found) < 2:
            steps.setdefault(found[0] if found else None, []).append(record["step_ms"])
    exact = statistics.median(steps.pop(None, [math.nan]))
    return {each: 100 * statistics.median(ms) / exact for each, ms in steps.items() if each}


def title(studies: list[Study]) -> str:
    """What is compared, and what the marks are."""
    first = studies[0]
    short, final = first.tune_steps or first.base["steps"], first.base["steps"]
    return (
        f"Studies {', '.join(study.name for study in studies)}: filled, {len(first.seeds)} seeds, "
        f"{final:,} steps; hollow, one seed, {short:,} steps\n"
        "at their best rate (directions, 8 bits: at exact's), triangles with a quarter of it on "
        "q, k and v"
    )


def bytes_plot(found: list[Point], title: str) -> bytes:
    """Perplexity above exact's against what is held of X."""
    figure, axes = new_figure(10, 6.5)
    placed = [(point, max(point.held, NOTHING)) for point in found]
    _draw(axes, placed)
    axes.set_xscale("log")
    axes.set_xlim(0.7 * NOTHING, 200)
    ticks = (NOTHING, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
    axes.set_xticks(ticks, ["nothing", *(f"{tick:g}" for tick in ticks[1:])])
    axes.minorticks_off()
    _name(axes, placed)
    axes.set_xlabel("held for backward, of the inputs X that are taken, in bf16 (%, log scale)")
    axes.set_title(title)
    return png(figure)


def time_plot(
    found: list[Point],
    title: str,
    times: dict[str, dict[Kind, float]],
    slope: float | None,
) -> bytes:
    """Perplexity above exact's against the time of a step, and where the two are worth the same."""
    figure, panels = new_figure(7 * len(times), 6.5, panels=len(times))
    for axes, (shape, of) in zip(panels, times.items(), strict=True):
        known = [(p, of[key]) for p in found if (key := kind(p.config, p.targets)) in of]
        _draw(axes, known)
        low, high = (edge([100, *(time for _, time in known)]) for edge in (min, max))
        if slope is not None:
            along = [low - 2 + (102 - low) * step / 50 for step in range(51)]
            worth = [100 * ((time / 100) ** slope - 1) for time in along]
            axes.plot(along, worth, "--", color="grey", lw=1.2,
                      label="as good as exact at equal time; below it: better")  # fmt: skip
            axes.legend(loc="lower left", frameon=False)
        axes.axvline(100, color="grey", lw=0.8)
        axes.set_xlim(low - 2, high + 4)
        _name(axes, known)
        axes.set_xlabel(f"time of a compiled step of LLaMA {shape} (% of exact's)")
    figure.suptitle(f"{title}\nPerplexities are the studies' (60M) in all panels")
    return png(figure)


def _draw(axes: Any, placed: list[tuple[Point, float]]) -> None:
    """Exact training, and every point; a cell's short and final ones are joined."""
    axes.plot(100, 0, "*", color=COLOURS[0], ms=13)
    axes.annotate("exact", (100, 0), xytext=(6, 8), textcoords="offset points")
    for name in dict.fromkeys(point.name for point, _ in placed):
        mine = [(point, place) for point, place in placed if point.name == name]
        colour = _colour(mine[0][0])
        axes.plot([place for _, place in mine], [p.above for p, _ in mine], ":", color=colour, lw=1)
        for point, place in mine:
            face = colour if point.is_final else "white"
            mark = "o" if point.lr_factor == 1 else "v"
            axes.errorbar(place, point.above, point.spread, fmt=mark, ms=8, color=colour, mfc=face,
                          capsize=3)  # fmt: skip
    percent_axis(axes)


def percent_axis(axes: Any) -> None:
    """Upwards the perplexity above exact's, from nothing to twice as much."""
    axes.set_yscale("symlog", linthresh=1, linscale=0.6)
    axes.set_ylim(-0.7, 200)
    axes.set_yticks(PERPLEXITIES, [f"{each:g}" for each in PERPLEXITIES])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set_ylabel("validation perplexity above exact's (%)")


def _name(axes: Any, placed: list[tuple[Point, float]]) -> None:
    """Names each cell once, at its final point if it has one: at the first place that is free."""
    last = {point.name: (point, place) for point, place in placed}
    marks = axes.transData.transform([(100, 0), *((place, p.above) for p, place in placed)])
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in marks]
    frame = axes.get_window_extent()
    for point, place in last.values():
        for (dx, dy), side in itertools.product(OFFSETS, ("left", "right")):
            label = axes.annotate(
                point.name.partition(", bytes")[0], (place, point.above),
                xytext=(dx if side == "left" else -dx, dy), ha=side,
                textcoords="offset points", fontsize="small", color=_colour(point),
            )  # fmt: skip
            box = label.get_window_extent()
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and box.y1 < frame.y1
            if inside and not box.count_overlaps(taken):
                break
            label.remove()
        else:
            raise ValueError(f"no room for the name of {point.name}.")
        taken.append(box)


def _colour(point: Point) -> str:
    return COLOURS[1 + METHODS.index(point.config.method)]


def main() -> None:
    """Draw both, and print what is on them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--speeds", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    output, folders = options.output, options.folders
    records = [
        json.loads(line) for path in options.speeds for line in path.read_text().splitlines()
    ]
    studies = [Study.load(folder / STUDY) for folder in folders]
    exact = PammConfig("recompute")  # whose gradients are exact's: it is not trained
    found = [Point("recompute", exact, 0.0, 0.0, 0.0, True, 1.0)]
    for study, folder in zip(studies, folders, strict=True):
        found += points(study, folder)
    times = {shape: step_times(records, shape) for shape in SHAPES}
    (output / "frontier-bytes.png").write_bytes(bytes_plot(found, title(studies)))
    picture = time_plot(found, title(studies), times, slope(studies[0], folders[0]))
    (output / "frontier-time.png").write_bytes(picture)
    for point in sorted(found, key=lambda point: (point.is_final, point.above)):
        key = kind(point.config, point.targets)
        steps = [f"{shape} {of[key]:.1f} %" for shape, of in times.items() if key in of]
        length = "final" if point.is_final else "short"
        print(
            f"{point.name:34} {length}  {point.held:5.2f} % held  {point.above:+6.2f} ± "
            f"{point.spread:.2f} %  step: {', '.join(steps)}"
        )


if __name__ == "__main__":
    main()
