"""benchmarks/watch_time.py runs to its end on a tiny model."""

import json
from pathlib import Path

from tests.helpers import run_script


def test_plain_and_watched_steps_of_each_method(tmp_path: Path) -> None:
    results = tmp_path / "watch.jsonl"
    run_script("benchmarks/watch_time.py", str(results), "--tiny")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(r["method"], r["arm"]) for r in records] == [
        (method, arm) for method in ("sampled", "pamm") for arm in ("plain", "watched")
    ]
    assert ["metrics_ms" in record for record in records] == 2 * [False, True]
