"""Finds runs, studies, fine-tunings and analyses in folders, and what came of them."""

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pamm.config import read_mapping
from pamm.errors import PammError
from pamm.recipes.files import CONFIG, METRICS, RESULT, read_json_lines
from pamm.recipes.finetuning.glue.settings import GlueConfig
from pamm.recipes.finetuning.results import ROWS
from pamm.recipes.finetuning.settings import FinetuneConfig
from pamm.recipes.finetuning.vlm.settings import VlmConfig
from pamm.recipes.pretraining.results import read_metrics, read_results
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.studies.ablate import STUDY
from pamm.recipes.studies.analyze import ANALYSIS, read_analysis
from pamm.recipes.studies.study import Study

Curve = list[tuple[int, float]]
Tuning = dict[str, list[tuple[float, float]]]
"""Learning rate and loss of every cell."""

_POINTS = 150  # of a training curve, about
_SIZES = {(512, 8): "60M", (1024, 24): "350M", (2048, 24): "1B", (4096, 32): "7B"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One way of training, and what came of it; from a run (one seed) or from a study."""

    source: str
    name: str
    size: str
    config: PretrainConfig
    lr: float
    lr_factor: float
    seeds: int
    perplexity: float | None
    spread: float | None
    tokens_per_second: float | None
    """``None`` if other trainings took turns on the device, or may have."""
    held_bytes: int
    """As measured: trainings before 2026-11-29 did not see the state of "sampled"."""
    predicted_bytes: int
    paper_bytes: int | None
    device: str
    processes: int
    tuned: bool
    at_edge: bool
    curve: Curve
    """Of validations."""
    training: Curve
    """Of training steps, means of neighbours."""

    @property
    def method(self) -> str:
        """Of its arm."""
        return self.config.arms[0].config.method

    @property
    def ratio(self) -> float:
        """Of its arm."""
        return self.config.arms[0].config.ratio

    @property
    def layers(self) -> str:
        """Those that its arm converts."""
        return {"attention": "q/k/v", "mlp": "gate/up"}[self.config.arms[0].targets]

    @property
    def tolerance(self) -> float | None:
        """Of its arm."""
        return self.config.arms[0].config.tolerance


@dataclasses.dataclass(frozen=True)
class Finetuning:
    """A fine-tuning on GLUE or on images, and the rows of its ``Plan``."""

    folder: Path
    config: FinetuneConfig
    rows: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a study is.

    Args:
        tuning: what the rates were chosen from.
        tune_steps: of those trainings.
        left: trainings that could begin now.
    """

    tuning: Tuning
    tune_steps: int
    left: int


@dataclasses.dataclass(frozen=True)
class Found:
    """All that was found, by names that differ."""

    outcomes: list[Outcome]
    studies: dict[str, Progress]
    finetunings: dict[str, Finetuning]
    analyses: dict[str, tuple[Path, dict[str, Any]]]

    def free(self, name: str) -> str:
        """The name, made different from all that are taken."""
        taken = {each.source for each in self.outcomes} | {*self.finetunings, *self.analyses}
        free, number = name, 2
        while free in taken:
            free, number = f"{name} ({number})", number + 1
        return free

    def add(self, outcomes: list[Outcome]) -> str:
        """Take up outcomes of one source; returns the name that it has here."""
        name = self.free(outcomes[0].source if outcomes else "")
        self.outcomes.extend(dataclasses.replace(each, source=name) for each in outcomes)
        return name


def collect(folders: list[Path]) -> Found:
    """Everything below ``folders``.

    Raises:
        PammError: if a folder does not exist, or there is nothing in any of them.
    """
    found = Found([], {}, {}, {})
    for folder in folders:
        if not folder.is_dir():
            raise PammError(f"no such folder: {folder}.")
        for path in sorted(folder.rglob(CONFIG)):
            if any(path.parent.glob(f"*/{RESULT}")):
                found.add(_run(path.parent))
        for path in sorted(folder.rglob(STUDY)):
            if not any(path.parent.glob(f"runs/*/*/{RESULT}")):
                continue
            study = Study.load(path)
            if outcomes := _outcomes(study, path.parent):
                found.studies[found.add(outcomes)] = _progress(study, path.parent)
        for path in sorted(folder.rglob(ROWS)):
            if (path.parent / CONFIG).exists():
                study = _finetuning(path.parent)
                found.finetunings[found.free(study.config.name)] = study
        for path in sorted(folder.rglob(ANALYSIS)):
            analysis = (path.parent, read_analysis(path.parent))
            found.analyses[found.free(path.parent.name)] = analysis
    if not (found.outcomes or found.finetunings or found.analyses):
        raise PammError(f"no results of pamm in {', '.join(map(str, folders))}.")
    return found


def _finetuning(folder: Path) -> Finetuning:
    kind = GlueConfig if "tasks" in read_mapping(folder / CONFIG) else VlmConfig
    return Finetuning(folder, kind.load(folder / CONFIG), read_json_lines(folder / ROWS))


def size_of(config: PretrainConfig) -> str:
    """Name of the paper's model of this shape, or its width and depth."""
    assert isinstance(config.model, dict)
    shape = (config.model.get("hidden_size"), config.model.get("num_hidden_layers"))
    return _SIZES.get(shape, f"{shape[0]} x {shape[1]} layers")  # type: ignore[arg-type]


def _run(folder: Path) -> list[Outcome]:
    config = PretrainConfig.load(folder / CONFIG)
    arms = {arm.name: arm for arm in config.arms}
    metrics = read_metrics(config, folder)
    return [
        Outcome(
            source=config.name,
            name=result.name,
            size=size_of(config),
            config=dataclasses.replace(config, arms=(arms[result.name],)),
            lr=result.lr,
            lr_factor=result.lr_factor,
            seeds=1,
            perplexity=result.perplexity,
            spread=None,
            tokens_per_second=result.tokens_per_second if result.sharing == 1 else None,
            held_bytes=result.held_bytes,
            predicted_bytes=result.predicted_bytes,
            paper_bytes=result.paper_bytes,
            device=result.device,
            processes=result.processes,
            tuned=False,
            at_edge=False,
            curve=_curve(metrics[result.name]),
            training=_training(metrics[result.name]),
        )
        for result in read_results(config, folder)
    ]


def _outcomes(study: Study, folder: Path) -> list[Outcome]:
    """Of the cells of which one final training at least is finished."""
    outcomes = []
    for row in study.summary(folder):
        runs = study.final(folder, row["cell"])
        metrics = [read_json_lines(run.folder / METRICS) for run in runs if run.result]
        outcome = Outcome(
            source=study.name,
            name=row["cell"],
            size=size_of(runs[0].config),
            config=runs[0].config,
            tuned=len(study.lrs) > 1,
            at_edge=row["lr_at_edge"],
            processes=1,
            tokens_per_second=row["tokens_per_second"] if row["sharing"] == 1 else None,
            curve=_mean(map(_curve, metrics)),
            training=_mean(map(_training, metrics)),
            **{
                key: row[key]
                for key in (
                    *("lr", "lr_factor", "seeds", "perplexity", "spread"),
                    *("held_bytes", "predicted_bytes", "paper_bytes", "device"),
                )
            },
        )
        outcomes.append(outcome)
    return outcomes


def _progress(study: Study, folder: Path) -> Progress:
    tuning = {
        cell: [(run.config.lr, run.loss) for run in study.tuning(folder, cell) if run.result]
        for cell in study.cells
    }
    left = len(study.to_do(folder))
    return Progress(tuning, study.tune_steps or study.longest().steps, left)


def _mean(curves: Iterable[Curve]) -> Curve:
    """Over seeds."""
    return [
        (points[0][0], statistics.mean(value for _, value in points))
        for points in zip(*curves, strict=False)
    ]


def _training(metrics: list[dict[str, Any]]) -> Curve:
    """Step and loss, as means over so many steps that a line is readable."""
    steps = [line for line in metrics if line.get("loss") is not None]
    width = max(1, len(steps) // _POINTS)
    parts = (steps[start : start + width] for start in range(0, len(steps), width))
    return [(part[-1]["step"], statistics.mean(line["loss"] for line in part)) for part in parts]


def _curve(metrics: list[dict[str, Any]]) -> Curve:
    """Step and loss of every validation."""
    lines = (line for line in metrics if line.get("eval_loss") is not None)
    return [(line["step"], line["eval_loss"]) for line in lines]
