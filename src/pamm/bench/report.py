"""``pamm bench report``: results to a page of tables and a picture."""

from pathlib import Path

from pamm.bench.arms import arm_config, place
from pamm.bench.records import Record, load
from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.report import format_bytes

_ORDER = ("60M", "350M", "1B", "7B")


def write_report(results: Path, output: Path) -> list[Path]:
    """Write ``benchmarks.md`` and ``speed.png`` from the newest result of every case."""
    records = load(results)
    latest = {_case(record): record for record in records}
    for record in latest.values():
        record["exact"] = _exact(records, record)
    op = [record for record in latest.values() if record.get("benchmark") == "op"]
    model = [record for record in latest.values() if record.get("benchmark") == "model"]
    breakdown = [record for record in latest.values() if record.get("benchmark") == "breakdown"]
    if not op and not model:
        raise PammError(f"{results} holds no results of pamm bench op or pamm bench model.")
    output.mkdir(parents=True, exist_ok=True)
    page = ["# Benchmarks", "", _INTRODUCTION, *_op_part(op), *_model_part(model)]
    page += _breakdown_part(breakdown)
    paths = [output / "benchmarks.md"]
    if model:
        from pamm.analysis.plots import png, speed_bars

        paths.append(output / "speed.png")
        paths[-1].write_bytes(png(speed_bars(_speedups(model))))
        page += ["", "![Tokens per second against exact training](speed.png)"]
    paths[0].write_text("\n".join(page) + "\n", encoding="utf-8")
    return paths


_INTRODUCTION = """\
Made by `pamm bench report` from the JSON lines under `benchmarks/results`. Arms take turns in one
process; figures are medians. *exact / arm* above 1 means faster than exact training, always that
of the same run; where a case was run again with other arms, its line of exact is the last run's.
*paper* is PAMM in the paper's own operations (a permutation of all tokens, cosines of normalised
rows, `index_add_`, one compression for each of q, k and v)."""


def _case(record: Record) -> tuple[object, ...]:
    keys = ("benchmark", "device", "model", "layers", "tokens", "n", "m", "layout", "k", "dtype")
    return tuple(record.get(key) for key in (*keys, "compiled", "arm", "pass", "part"))


def _op_part(records: list[Record]) -> list[str]:
    if not records:
        return []
    lines = [
        "",
        "## Projections of one block, forward and backward",
        "",
        "| tokens x in -> out | k | layout | GPU | arm | forward ms | backward ms | total ms "
        "| exact / arm | held |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in sorted(records, key=lambda r: (r["device"], r["layout"], r["n"], _arm(r))):
        exact = record["exact"]
        phases = [f"{record[f'{name}_ms']:.3f}" for name in ("forward", "backward", "total")]
        ratio = f"{exact['total_ms'] / record['total_ms']:.3f}" if exact else ""
        k = record["k"] if record["arm"] in ("exact", "pamm", "paper") else ""
        lines.append(
            f"| {record['tokens']:,} x {record['n']} -> 3 x {record['m']} | {k} "
            f"| {record['layout']} | {record['device']} | {record['arm']} | {' | '.join(phases)} "
            f"| {ratio} | {format_bytes(record['held_bytes'])} |"
        )
    return lines


def _model_part(records: list[Record]) -> list[str]:
    if not records:
        return []
    lines = [
        "",
        "## Whole training steps",
        "",
        "LLaMA shapes, sequence 256, bf16 weights, fused AdamW, SDPA, loss over 32,000 words. *X "
        "freed* is how much lower the peak is, as a share of the inputs X that the arm takes.",
        "",
        "| model | layers | tokens | mode | GPU | arm | tokens/s | exact / arm | peak allocated "
        "| X freed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in sorted(records, key=_model_order):
        exact = record["exact"]
        ratio = f"{exact['total_ms'] / record['total_ms']:.3f}" if exact else ""
        peak, freed = "", ""
        if "peak_allocated_bytes" in record:
            peak = format_bytes(record["peak_allocated_bytes"])
            if exact and record["arm"] != "exact":
                less = exact["peak_allocated_bytes"] - record["peak_allocated_bytes"]
                freed = f"{less / record['x_bytes']:.1%}"
        lines.append(
            f"| {record['model']} | {record['layers']} | {record['tokens']:,} | {_mode(record)} "
            f"| {record['device']} | {record['arm']} | {record['tokens_per_s']:,.0f} | {ratio} "
            f"| {peak} | {freed} |"
        )
    return lines


def _breakdown_part(records: list[Record]) -> list[str]:
    lines = []
    keys = ("model", "arm", "device")
    for model, arm, device in dict.fromkeys(tuple(r[key] for key in keys) for r in records):
        rows = [r for r in records if tuple(r[key] for key in keys) == (model, arm, device)]
        first = rows[0]
        lines += [
            "",
            f"## Where the time of {arm} goes: {model}, {first['layers']} layers, eager, {device}",
            "",
            f"One step takes {first['iteration_ms']:.1f} ms.",
            "",
            "| pass | part | ms | of the iteration | of the pass |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {row['pass']} | {row['part']} | {row['ms']:.2f} "
            f"| {row['share_of_iteration']:.2%} | {row['share_of_pass']:.2%} |"
            for row in rows
        ]
    return lines


def _is_own_ratio(arm: str) -> bool:
    """Whether a method is at the ratio that it has by default, which is not named, but for that of
    the default method: now, and before there were 8 bits.
    """
    if ":" not in arm or arm == "sampled:1/2:16bit":
        return True
    return "+" not in arm and arm_config(arm) == PammConfig()


def _speedups(records: list[Record]) -> dict[str, dict[str, float]]:
    """Speed of every method at its own ratio against exact, by the label of the case."""
    cases: dict[str, dict[str, float]] = {}
    for record in sorted(records, key=_model_order):
        exact = record["exact"]
        if exact and record["arm"] != "exact" and _is_own_ratio(record["arm"]):
            label = f"{record['model']}\n{_mode(record)}\n{_short(record['device'])}"
            speed = exact["total_ms"] / record["total_ms"]
            cases.setdefault(label, {})[record["arm"]] = speed
    return cases


def _exact(records: list[Record], like: Record) -> Record | None:
    """The exact arm of the same run: the last of its case with the same commit and date."""
    wanted = *_case({**like, "arm": "exact"}), like.get("commit"), like.get("date")
    same = (r for r in reversed(records) if (*_case(r), r.get("commit"), r.get("date")) == wanted)
    return next(same, None)


def _model_order(record: Record) -> tuple[object, ...]:
    size = record["model"]
    position = _ORDER.index(size) if size in _ORDER else len(_ORDER)
    return record["device"], position, record["compiled"], _arm(record)


def _arm(record: Record) -> tuple[int, str]:
    return place(record["arm"]), record["arm"]


def _mode(record: Record) -> str:
    return "compiled" if record["compiled"] else "eager"


def _short(device: str) -> str:
    return device.removeprefix("NVIDIA ").split(" ")[0]
