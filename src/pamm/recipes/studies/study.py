"""What an ablation study is: cells, a grid of learning rates for each, seeds; and what it found."""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pamm.config import check_fields, read_mapping, whole_number
from pamm.errors import PammError
from pamm.recipes.files import RESULT, is_over, read_json
from pamm.recipes.pretraining.results import ArmResult
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.settings import Arm, folder_name, positive
from pamm.recipes.studies.cells import cells

_OF_A_CELL = ("name", "arms", "lr", "seed")


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of a study.

    Args:
        cell: name of its cell.
        config: the run, with one arm.
        folder: in the study's folder.
    """

    cell: str
    config: PretrainConfig
    folder: Path

    @property
    def arm(self) -> Arm:
        """The one."""
        return self.config.arms[0]

    @property
    def title(self) -> str:
        """For people."""
        config = self.config
        return f"{self.cell}, lr {config.lr:g}, seed {config.seed}, {config.steps:,} steps"

    @property
    def is_over(self) -> bool:
        """Whether it is finished, or failed since the study was last started."""
        return is_over(self.folder)

    @property
    def note(self) -> str:
        """What a finished one came to, for people."""
        return f"perplexity {self.result.perplexity}" if self.result else ""

    @property
    def loss(self) -> float:
        """At the end; infinite if the run failed or its loss is not finite."""
        result = self.result
        known = result is not None and result.validation_loss is not None
        return result.validation_loss if known else math.inf  # type: ignore[union-attr,return-value]

    @property
    def result(self) -> ArmResult | None:
        """What it measured, if it is finished."""
        path = self.folder / RESULT
        return ArmResult(**read_json(path)) if path.exists() else None


@dataclasses.dataclass(frozen=True)
class Study:
    """A grid of trainings: every cell at its best learning rate, with several seeds.

    Every cell, exact ones too, is first trained once at each rate, with the first seed; the rate
    with the lowest validation loss is then trained with every seed.

    Args:
        name: of the study.
        base: keys of a run (``PretrainConfig``), without name, arms, lr and seed.
        cells: the paper's studies (ratio, shape, tolerance, method), one or a list; or a mapping
            from names to keys of an arm, and under ``run`` what differs from the base.
        lrs: learning rates to choose from, the same for every cell but those whose arm has an
            ``lr`` of its own, which is known to be good from elsewhere.
        more_lrs: how many rates a cell may add, one after the other, while its best one is the
            least or the largest: in the same proportion as the last two there.
        seeds: of weights, batches and draws.
        tune_steps: length of the trainings that choose the rate; ``None`` takes all steps.
        keep_checkpoints: whether a run writes a checkpoint after its last step, and keeps it; or
            the names of the cells whose runs do.

    Raises:
        PammError: if a value is outside what is allowed.
    """

    name: str
    base: dict[str, Any]
    cells: Any
    lrs: tuple[float, ...]
    more_lrs: int = 0
    seeds: tuple[int, ...] = (0,)
    tune_steps: int | None = None
    keep_checkpoints: bool | list[str] = False

    def __post_init__(self) -> None:
        folder_name("name", self.name)
        if not isinstance(self.base, dict) or any(key in self.base for key in _OF_A_CELL):
            raise PammError(
                f"base is {self.base!r}; write the keys of a run, without {', '.join(_OF_A_CELL)}."
            )
        for key in ("lrs", "seeds"):
            if not isinstance(getattr(self, key), list | tuple) or not getattr(self, key):
                raise PammError(f"{key} is {getattr(self, key)!r}; give a list of at least one.")
        object.__setattr__(self, "lrs", tuple(sorted(positive("lrs", lr) for lr in self.lrs)))
        object.__setattr__(self, "seeds", tuple(self.seeds))
        for seed in self.seeds:
            whole_number("seeds", seed, least=0)
        if self.tune_steps is not None:
            whole_number("tune_steps", self.tune_steps, least=1)
        whole_number("more_lrs", self.more_lrs, least=0)
        if not isinstance(self.cells, dict):
            exact = self._config("exact", {"method": "exact"}, self.lrs[0], self.seeds[0])
            object.__setattr__(self, "cells", cells(self.cells, exact))
        if not self.cells:
            raise PammError("cells is empty; give at least one.")
        kept = self.keep_checkpoints
        if not isinstance(kept, bool) and (
            not isinstance(kept, list) or any(name not in self.cells for name in kept)
        ):
            raise PammError(f"keep_checkpoints is {kept!r}; give true, false or names of cells.")
        if len({_slug(name) for name in self.cells}) < len(self.cells):
            raise PammError(f"cells are {', '.join(self.cells)}; two have the same folder name.")
        for name in self.cells:  # whatever is wrong with one is found before anything is trained
            self.run(Path(), name, self.lrs[0], self.seeds[0])

    @classmethod
    def load(cls, path: str | Path) -> "Study":
        """Read a YAML or JSON file."""
        values = read_mapping(path)
        try:
            check_fields(cls, values, "the study")
            return cls(**values)
        except PammError as error:
            raise PammError(f"{path}: {error}") from error

    def longest(self) -> PretrainConfig:
        """The run that sees most tokens: the tokens of all are prepared for it."""
        runs = [self.run(Path(), name, self.lrs[0], self.seeds[0]) for name in self.cells]
        return max((run.config for run in runs), key=lambda c: c.steps * c.tokens_per_step)

    def run(self, folder: Path, cell: str, lr: float, seed: int, steps: int | None = None) -> Run:
        """One training; ``steps`` other than the base's are for choosing the rate."""
        config = self._config(cell, self.cells[cell], lr, seed, steps)
        name = f"lr-{lr:g}_seed-{seed}" + ("" if steps is None else f"_steps-{steps}")
        return Run(cell, config, folder / "runs" / _slug(cell) / name)

    def lrs_of(self, cell: str) -> tuple[float, ...]:
        """The rates that a cell chooses from: its own one alone, if it has that."""
        own = self._config(cell, self.cells[cell], self.lrs[0], self.seeds[0]).arms[0].lr
        return self.lrs if own is None else (own,)

    def tuning(self, folder: Path, cell: str) -> list[Run]:
        """One training at each rate, in the order of rates; none if there is only one rate.

        Rates beyond the given ones are among them once it is known that they are needed.
        """

        def run(lr: float) -> Run:
            return self.run(folder, cell, lr, self.seeds[0], self.tune_steps)

        lrs = self.lrs_of(cell)
        runs = [run(lr) for lr in lrs] if len(lrs) > 1 else []
        for _ in range(self.more_lrs if runs else 0):
            if not all(run.is_over for run in runs):
                break
            best = min(runs, key=lambda run: run.loss)
            rates = [run.config.lr for run in runs]
            if best is runs[0]:
                runs.insert(0, run(_beyond(rates[1], rates[0])))
            elif best is runs[-1]:
                runs.append(run(_beyond(rates[-2], rates[-1])))
            else:
                break
        return runs

    def best_lr(self, folder: Path, cell: str) -> float | None:
        """The rate with the lowest loss; ``None`` while it is not known."""
        runs = self.tuning(folder, cell)
        if not all(run.is_over for run in runs):
            return None
        return min(runs, key=lambda run: run.loss).config.lr if runs else self.lrs_of(cell)[0]

    def keeps_checkpoints(self, run: Run) -> bool:
        """Whether the last checkpoint of a run is written, and stays."""
        kept = self.keep_checkpoints
        return kept if isinstance(kept, bool) else run.cell in kept

    def final(self, folder: Path, cell: str) -> list[Run]:
        """The trainings at the best rate, one for each seed; none while the rate is not known."""
        lr = self.best_lr(folder, cell)
        return [] if lr is None else [self.run(folder, cell, lr, seed) for seed in self.seeds]

    def to_do(self, folder: Path) -> list[Run]:
        """What can be trained now, and is not over: final trainings need a rate that was chosen."""
        both = (self.tuning, self.final)
        runs = [run for stage in both for cell in self.cells for run in stage(folder, cell)]
        return [run for run in {run.folder: run for run in runs}.values() if not run.is_over]

    def is_over(self, folder: Path) -> bool:
        """Whether nothing is left to do, now or later."""
        return not self.to_do(folder)

    def summary(self, folder: Path) -> list[dict[str, Any]]:
        """One row for each cell that has a finished final training."""
        return list(self._rows(folder))

    def _rows(self, folder: Path) -> Iterator[dict[str, Any]]:
        for cell in self.cells:
            results = [run.result for run in self.final(folder, cell)]
            done = [result for result in results if result is not None]
            if not done:
                continue
            values = [result.perplexity for result in done if result.perplexity is not None]
            first, lr = done[0], done[0].lr
            config = self.run(folder, cell, lr, self.seeds[0]).config
            tried = [run.config.lr for run in self.tuning(folder, cell)]
            yield {
                "cell": cell,
                "arm": config.arms[0].to_dict(),
                "run": self.cells[cell].get("run", {}),
                "lr": lr,
                "lr_factor": first.lr_factor,
                "lr_at_edge": bool(tried) and lr in (tried[0], tried[-1]),
                "seeds": len(done),
                "not_finite": len(done) - len(values),
                "perplexity": statistics.mean(values) if values else None,
                "spread": statistics.stdev(values) if len(values) > 1 else None,
                "tokens_per_second": statistics.median(r.tokens_per_second for r in done),
                "sharing": max((r.sharing for r in done), key=lambda n: n or math.inf),
                "held_bytes": first.held_bytes,
                "predicted_bytes": first.predicted_bytes,
                "paper_bytes": first.paper_bytes,
                "steps": first.steps,
                "tokens": first.tokens,
                "parameters": first.parameters,
                "precision": first.precision,
                "device": first.device,
                "versions": first.versions,
            }

    def _config(
        self, cell: str, values: object, lr: float, seed: int, steps: int | None = None
    ) -> PretrainConfig:
        if not isinstance(values, dict):
            raise PammError(f"cell {cell!r} is {values!r}; write a mapping.")
        of_arm = {key: value for key, value in values.items() if key != "run"}
        of_run = values.get("run", {})
        if not isinstance(of_run, dict) or any(key in of_run for key in _OF_A_CELL):
            raise PammError(
                f"run of cell {cell!r} is {of_run!r}; write keys of a run, without "
                f"{', '.join(_OF_A_CELL)}."
            )
        run = {**self.base, **of_run, **({} if steps is None else {"steps": steps})}
        names = {"name": _slug(self.name), "arms": {cell: of_arm}, "lr": lr, "seed": seed}
        return PretrainConfig.from_dict({**run, **names})


def _beyond(before: float, last: float) -> float:
    """The next one of a geometric row, short enough for the name of a folder."""
    return float(f"{last * last / before:.6g}")


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(name)).strip("-.")
