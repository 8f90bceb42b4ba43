"""benchmarks/watch_time.py runs to its end on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/watch_time.py"


def test_plain_and_watched_steps_of_each_method(tmp_path: Path) -> None:
    results = tmp_path / "watch.jsonl"
    command = [sys.executable, str(SCRIPT), str(results), "--tiny"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(r["method"], r["arm"]) for r in records] == [
        (method, arm) for method in ("sampled", "pamm") for arm in ("plain", "watched")
    ]
    assert ["metrics_ms" in record for record in records] == 2 * [False, True]
