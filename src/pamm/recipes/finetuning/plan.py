"""Which fine-tunings there are, what is to be done next, and what they found."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from pamm.recipes.files import FAILED, RESULT, is_over, read_json
from pamm.recipes.finetuning.settings import FinetuneConfig
from pamm.recipes.settings import Arm

C = TypeVar("C", bound=FinetuneConfig)


@dataclasses.dataclass(frozen=True)
class FinetuneRun:
    """One fine-tuning: of one task, with one arm, rate, factor and seed."""

    task: str
    metric: str
    arm: Arm
    lr: float
    lr_factor: float
    seed: int
    folder: Path

    @property
    def title(self) -> str:
        """For people."""
        rates = f"lr {self.lr:g}, factor {self.lr_factor:g}, seed {self.seed}"
        return f"{self.task}, {self.arm.name}, {rates}"

    @property
    def is_over(self) -> bool:
        """Whether it is finished, or failed since the command was last given."""
        return is_over(self.folder)

    @property
    def result(self) -> dict[str, Any] | None:
        """What it measured, if it is finished."""
        path = self.folder / RESULT
        return read_json(path) if path.exists() else None

    @property
    def converts(self) -> bool:
        """Exact arms stay as they are, unless q, k and v have a rate of their own."""
        return not self.arm.is_exact or self.lr_factor != 1

    @property
    def note(self) -> str:
        """What it came to, for people."""
        return f"{self.metric} {self.score:.4f}"

    @property
    def score(self) -> float:
        """At the end; the worst there is if the run failed or its loss is not finite."""
        result = self.result
        known = result is not None and result["score"] is not None
        return result["score"] if known else -math.inf  # type: ignore[index]


class Plan(Generic[C]):
    """The runs of a configuration, in its folder. What is chosen is read from finished runs.

    Args:
        config: what is fine-tuned.
        folder: of all its runs.
        metrics: the name of the score, by the names of the tasks.
        factor_task: on which the factor is chosen; may be none of the tasks.
    """

    columns: tuple[str, ...] = ()
    """Of a result, that are the same for all seeds and belong in the arm's row."""

    def __init__(
        self,
        config: C,
        folder: Path,
        metrics: dict[str, str],
        factor_task: str,
        tasks: Sequence[str],
    ) -> None:
        self.config, self.folder = config, folder
        self.metrics, self.factor_task, self.tasks = metrics, factor_task, tasks

    def to_do(self) -> list[FinetuneRun]:
        """What can be trained now, and is not over."""
        arms = self.config.arms
        runs = [run for arm in arms for run in self._factor_runs(arm)]
        for stage in (self._lr_runs, self.final):
            runs += [run for task in self.tasks for arm in arms for run in stage(task, arm)]
        return [run for run in {run.folder: run for run in runs}.values() if not run.is_over]

    def failed(self) -> list[Path]:
        """What says why a training failed, for each that did."""
        return sorted(self.folder.glob(f"runs/*/*/*/{FAILED}"))

    @property
    def is_finished(self) -> bool:
        """Whether no training is left, or to be tried again."""
        return not (self.to_do() or self.failed())

    def final(self, task: str, arm: Arm) -> list[FinetuneRun]:
        """One run for each seed, at the best rate; none while that is not known."""
        best = _best(self._lr_runs(task, arm))
        if best is None:
            return []
        return [self._run(task, arm, best.lr, best.lr_factor, seed) for seed in self.config.seeds]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each task and arm with a finished final run: mean and spread over seeds."""
        made = []
        for task in self.tasks:
            exact = None
            for arm in self.config.arms:
                runs = self.final(task, arm)
                results = [run.result for run in runs if run.result is not None]
                if not results:
                    continue
                row = self._row(task, arm, runs, results)
                if arm.is_exact and exact is None:
                    exact = row
                elif exact is not None and None not in (row["mean"], exact["spread"]):
                    row["within_exact"] = row["mean"] >= exact["mean"] - exact["spread"]
                made.append(row)
        return made

    def _row(
        self, task: str, arm: Arm, runs: list[FinetuneRun], results: list[dict[str, Any]]
    ) -> dict[str, Any]:
        first, lrs = results[0], self._lrs(arm)
        scores = [result["score"] for result in results]
        return {
            "task": task,
            "arm": arm.name,
            "config": arm.to_dict(),
            "metric": self.metrics[task],
            **mean_and_spread(scores),
            "scores": [score for score in scores if score is not None],
            "seeds": len(results),
            "not_finite": scores.count(None),
            "lr": runs[0].lr,
            "lr_at_edge": len(lrs) > 1 and runs[0].lr in (lrs[0], lrs[-1]),
            "lr_factor": runs[0].lr_factor,
            **{key: first[key] for key in (*self.columns, "steps", "device", "versions")},
        }

    def _lrs(self, arm: Arm) -> tuple[float, ...]:
        return self.config.lrs if arm.lr is None else (arm.lr,)

    def _factors(self, arm: Arm) -> tuple[float, ...]:
        if arm.lr_factor is not None:
            return (arm.lr_factor,)
        return self.config.lr_factors if arm.approximates else (1.0,)

    def _factor_runs(self, arm: Arm) -> list[FinetuneRun]:
        """Every rate with every factor on one task; none if there is nothing to choose."""
        factors, task, seed = self._factors(arm), self.factor_task, self.config.seeds[0]
        if len(factors) == 1:
            return []
        pairs = [(lr, factor) for factor in factors for lr in self._lrs(arm)]
        return [self._run(task, arm, lr, factor, seed) for lr, factor in pairs]

    def _lr_runs(self, task: str, arm: Arm) -> list[FinetuneRun]:
        """Every rate on a task, with the chosen factor; none while that is not known."""
        factors = self._factors(arm)
        best = _best(self._factor_runs(arm))
        if len(factors) > 1 and best is None:
            return []
        factor = min(factors) if best is None else best.lr_factor
        seed = self.config.seeds[0]
        return [self._run(task, arm, lr, factor, seed) for lr in self._lrs(arm)]

    def _run(self, task: str, arm: Arm, lr: float, factor: float, seed: int) -> FinetuneRun:
        name = f"lr-{lr:g}_factor-{factor:g}_seed-{seed}"
        folder = self.folder / "runs" / task / arm.folder / name
        return FinetuneRun(task, self.metrics[task], arm, lr, factor, seed, folder)


def mean_and_spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """``mean`` and standard deviation, ``spread``, of those that are known."""
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.mean(known) if known else None,
        "spread": statistics.stdev(known) if len(known) > 1 else None,
    }


def _best(runs: list[FinetuneRun]) -> FinetuneRun | None:
    """The run with the highest score, the first of equals; None unless all are over."""
    return max(runs, key=lambda run: run.score) if runs and all(r.is_over for r in runs) else None
