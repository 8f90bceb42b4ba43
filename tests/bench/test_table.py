"""Tables of benchmarks as a terminal of 80 columns shows them."""

import json
from pathlib import Path

import torch
from rich.console import Console

from pamm.bench.arms import inputs
from pamm.bench.model import bench_model
from pamm.bench.report import write_report
from pamm.bench.table import model_table
from pamm.config import PammConfig

SPEEDS = Path(__file__).parents[2] / "benchmarks/results/h200/speed.jsonl"


def test_no_number_is_cut_off_at_80_columns() -> None:
    read = [json.loads(line) for line in SPEEDS.read_text().splitlines()]
    records = [each for each in read if "peak_allocated_bytes" in each]
    console = Console(width=80)
    with console.capture() as shown:
        console.print(model_table(records))
    text = shown.get()
    assert "…" not in text
    assert all(f"{each['tokens_per_s']:,.0f}" in text for each in records)


def test_the_page_does_not_mix_breakdowns_of_two_cards(tmp_path: Path) -> None:
    """One step's time and shares are those of the card that the heading names."""
    read = [json.loads(line) for line in SPEEDS.read_text().splitlines()]
    records = [each for each in read if each["benchmark"] == "breakdown"]
    other = [each | {"device": "Other", "iteration_ms": 99.9} for each in records]
    (tmp_path / "all.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in read + other))
    write_report(tmp_path, tmp_path / "page")
    page = (tmp_path / "page/benchmarks.md").read_text()
    parts = [part for part in page.split("\n## ") if part.startswith("Where the time")]
    others = [part for part in parts if part.partition("\n")[0].endswith("Other")]
    mine = [part for part in parts if part not in others]
    assert len(mine) == len(others) > 0
    for one, two in zip(mine, others, strict=True):
        assert "One step takes 99.9 ms" in two
        assert one.count("\n| ") == two.count("\n| ")


def test_an_arm_that_takes_gate_and_up_too_is_a_share_of_twice_the_inputs() -> None:
    assert [inputs(name) for name in ("exact", "pamm", "exact+pamm", "pamm+pamm")] == [1, 1, 1, 2]
    arms, config = ("exact", "pamm+pamm"), PammConfig("pamm")
    one, two = bench_model("tiny", config, torch.device("cpu"), arms, 1, compiled=False, layers=1)
    assert two["x_bytes"] == 2 * one["x_bytes"]
