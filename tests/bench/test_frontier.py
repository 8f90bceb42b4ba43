"""benchmarks/frontier.py on the committed studies, and how it pairs speeds."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/frontier.py"
STUDY = ROOT / "benchmarks/results/h200/studies/60m"
FINALS = STUDY.with_name("60m-finals")


def test_both_pictures_of_the_committed_studies(tmp_path: Path) -> None:
    results = STUDY.parents[1]
    speeds = [str(results / name) for name in ("speed.jsonl", "race-1b.jsonl")]
    out = run_script(
        "benchmarks/frontier.py", str(tmp_path), str(STUDY), str(FINALS), "--speeds", *speeds
    )
    assert {path.name for path in tmp_path.iterdir()} == {"frontier-bytes.png", "frontier-time.png"}
    line = next(line for line in out.splitlines() if line.startswith("pamm 1/256"))
    tries = [
        json.loads(p.read_text()) for p in (STUDY / "runs").glob("pamm-1-256/*1000/result.json")
    ]
    exact = [json.loads(p.read_text()) for p in (STUDY / "runs").glob("exact/*1000/result.json")]
    best, level = (min(each["perplexity"] for each in of) for of in (tries, exact))
    assert line.split()[6] == f"{100 * (best / level - 1):+.2f}"

    def of(cell: str, seed: int) -> float:
        """Perplexity in the study that has final trainings alone."""
        (path,) = (FINALS / "runs").glob(f"{cell}/*_seed-{seed}/result.json")
        return json.loads(path.read_text())["perplexity"]

    (line,) = (each for each in out.splitlines() if each.startswith("subspace 1/8  ")
               and " final " in each)  # fmt: skip
    above = [100 * (of("subspace-1-8", seed) / of("exact", seed) - 1) for seed in range(3)]
    assert f" {sum(above) / 3:+.2f} " in line, "against exact of the same study and seed"


def test_a_step_is_timed_against_exact_of_the_same_run() -> None:
    step_times = runpy.run_path(str(SCRIPT))["step_times"]

    def record(arm: str, ms: float, commit: str, **changes: Any) -> dict[str, Any]:
        case = {"benchmark": "model", "model": "1B", "compiled": True}
        return case | {"arm": arm, "total_ms": ms, "commit": commit} | changes

    records = [
        record("exact", 100.0, "old"),
        record("pamm", 90.0, "old"),
        record("exact", 200.0, "new"),
        record("pamm:1/128", 190.0, "new"),
        record("paper", 250.0, "new"),
        record("sampled:1/4", 170.0, "new"),
        record("sampled:1/4:16bit", 220.0, "new"),
        record("sampled:1/4:64", 160.0, "new"),
        record("sampled:1/4:64+recompute", 150.0, "new"),
        record("exact+sampled:1/8:64", 180.0, "new"),
        record("recompute", 210.0, "alone"),
        record("pamm:1/256", 50.0, "new", compiled=False),
    ]
    assert step_times(records, "1B") == pytest.approx(
        {
            ("pamm", 1 / 512, 0, False, "attention"): 90,
            ("pamm", 1 / 128, 0, False, "attention"): 95,
            ("sampled", 1 / 4, 0, True, "attention"): 85,
            ("sampled", 1 / 4, 0, False, "attention"): 110,
            ("sampled", 1 / 4, 64, True, "attention"): 80,
            ("sampled", 1 / 8, 64, True, "mlp"): 90,
        }
    )


def test_races_give_times_too() -> None:
    step_times = runpy.run_path(str(SCRIPT))["step_times"]

    def record(step_ms: float, **run: Any) -> dict[str, Any]:
        return {"benchmark": "race", "size": "1B", "step_ms": step_ms, "run": run}

    sampled = {"method": "sampled", "ratio": "1/8", "directions": 64}
    records = [
        *(record(ms) for ms in (190.0, 200.0, 300.0)),
        *(record(ms, mlp=sampled) for ms in (170.0, 180.0, 250.0)),
        record(150.0, config={"method": "pamm", "ratio": "1/512"}),
        record(100.0, config={"method": "recompute"}, mlp=sampled),
        record(1.0, mlp=sampled) | {"size": "60M"},
        {"benchmark": "model", "model": "1B", "compiled": True, "commit": "new"}
        | {"arm": "exact", "total_ms": 100.0},
    ]
    expected = {
        ("sampled", 1 / 8, 64, True, "mlp"): 90,
        ("pamm", 1 / 512, 0, False, "attention"): 75,
    }
    assert step_times(records, "1B") == pytest.approx(expected)
    newer = records[-1] | {"arm": "exact+sampled:1/8:64", "total_ms": 95.0}
    expected[("sampled", 1 / 8, 64, True, "mlp")] = 95  # a benchmark counts for more than a race
    assert step_times([*records, newer], "1B") == pytest.approx(expected)
