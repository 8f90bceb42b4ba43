"""benchmarks/scaling.py between two CPU processes, and its picture."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks/scaling.py"


@pytest.mark.slow
def test_two_processes_measure_both_ways_and_both_arms(tmp_path: Path) -> None:
    results = tmp_path / "scaling.jsonl"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [str(SCRIPT), "run", "--models", "tiny", "--repeats", "2", "--eager"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node=2", *command, "--results", str(results)],
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(r["way"], r["arm"], r["gpus"]) for r in records] == [
        (way, arm, 2) for way in ("ddp", "fsdp2") for arm in ("exact", "pamm")
    ]
    for record in records:
        assert record["tokens_per_s"] == pytest.approx(2 * 1024 / record["total_ms"] * 1e3)

    picture = tmp_path / "scaling.png"
    run_script("benchmarks/scaling.py", "plot", str(results), str(picture))
    assert picture.stat().st_size > 5000


def test_efficiency_is_against_one_gpu_of_the_same_case() -> None:
    efficiency = runpy.run_path(str(SCRIPT))["efficiency"]

    def record(gpus: int, speed: float, **changes: Any) -> dict[str, Any]:
        case = {"model": "1B", "way": "ddp", "arm": "pamm", "device": "GPU", "compiled": True}
        return case | {"gpus": gpus, "tokens_per_s": speed} | changes

    four = record(4, 360.0)
    others = [record(1, 50.0, arm="exact"), record(1, 60.0, way="fsdp2"), four]
    assert efficiency(others, four) is None
    assert efficiency([*others, record(1, 100.0)], four) == pytest.approx(0.9)
