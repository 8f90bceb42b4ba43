"""Tables of benchmarks as a terminal of 80 columns shows them."""

import json
from pathlib import Path

from rich.console import Console

from pamm.bench.table import model_table

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
