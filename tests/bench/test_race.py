"""benchmarks/race.py: each arm trains for the same seconds, and is compared at the same second."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/race.py"


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # as Python does for a script
    return runpy.run_path(str(SCRIPT))


class Runner:
    """An arm whose steps take as long as it is told; the first turn compiles."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self._seconds = name, seconds
        self.done = self.steps = 0
        self.seconds, self._compiling = 0.0, 100.0
        self.looks: list[int] = []

    def advance(self, steps: int) -> float:
        self.done += steps
        compiling, self._compiling = self._compiling, 0.0
        return steps * self._seconds + compiling

    def restart(self, steps: int) -> None:
        self.steps, self.done, self.seconds, self.looks = steps, 0, 0.0, []

    def look(self) -> float:
        self.looks.append(self.done)
        return 1.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, when it is imported
def test_every_arm_has_the_same_seconds(race: dict[str, Any]) -> None:
    arms = [Runner("slow", 0.25), Runner("fast", 0.2)]
    lines = list(race["race"](arms, 100.0))
    assert [arm.steps for arm in arms] == [arm.done for arm in arms] == [400, 500]
    assert [arm.seconds for arm in arms] == pytest.approx([100.0, 100.0])
    assert arms[0].looks == list(range(40, 401, 40))
    assert arms[1].looks == list(range(50, 501, 50))
    assert lines[:2] == ["slow: 250.00 ms a step, 400 steps", "fast: 200.00 ms a step, 500 steps"]
    assert len(lines) == 2 + 2 * 10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_arms_are_compared_at_the_same_second(race: dict[str, Any]) -> None:
    curve = [{"seconds": 10.0, "loss": 4.0}, {"seconds": 20.0, "loss": 3.0}]
    for seconds, loss in ((10.0, 4.0), (12.5, 3.75), (20.0, 3.0), (21.0, 2.9)):
        assert race["_at"](curve, seconds) == pytest.approx(loss)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_arm_is_shown_at_its_own_best_rate(race: dict[str, Any]) -> None:
    def record(arm: str, lr: float, seed: int, perplexity: float) -> dict[str, Any]:
        curve = [{"seconds": 1.0, "loss": 3.0 + seed}, {"seconds": 2.0, "loss": perplexity / 10}]
        run = {"arm": arm, "lr": lr} | ({"seed": seed} if seed else {})
        return {"run": run, "perplexity": perplexity, "curve": curve}

    records = [
        record("exact", 1e-3, 0, 20.0),
        record("half", 1e-3, 0, 18.0),
        record("exact", 2e-3, 0, 21.0),
        record("half", 2e-3, 0, 17.0),
        record("exact", 1e-3, 1, 22.0),
        record("half", 2e-3, 1, 19.0),
        record("half", 1e-3, 1, 5.0),  # better there, but rates are chosen with the first seed
    ]
    arms = race["by_arm"](records)
    assert [*arms] == ["exact", "half"]
    chosen = {name: race["best"](runs) for name, runs in arms.items()}
    ends = {name: {seed: c[-1]["loss"] for seed, c in of.items()} for name, of in chosen.items()}
    assert ends == {"exact": {0: 2.0, 1: 2.2}, "half": {0: 1.7, 1: 1.9}}
    assert race["plot"](records).startswith(b"\x89PNG")
