import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.recipes.files import FAILED, RESULT
from pamm.recipes.studies.cells import held, ratio_for_bytes
from pamm.recipes.studies.study import Run, Study
from tests.recipes.helpers import config
from tests.recipes.pretraining.test_pretrain import result

STUDIES = Path(__file__).parents[3] / "benchmarks/studies"
CELLS = {"exact": {"method": "exact"}, "pamm 1/16": {"method": "pamm", "ratio": "1/16"}}


def values(folder: Path, **changes: Any) -> dict[str, Any]:
    """Keys of a study on the tiny run."""
    of_run = config(folder).to_dict()
    base = {k: v for k, v in of_run.items() if k not in ("name", "arms", "lr", "seed")}
    made = {"name": "tiny", "base": base, "cells": CELLS, "lrs": [1e-2, 1e-3], "seeds": [0, 1]}
    return made | {"tune_steps": 3} | changes


def study(folder: Path, **changes: Any) -> Study:
    return Study(**values(folder, **changes))


def finish(run: Run, loss: float | None) -> None:
    """As if the run had been trained."""
    run.folder.mkdir(parents=True)
    made = result(run.cell, None if loss is None else loss * 10, 100)
    content = vars(made) | {"validation_loss": loss, "lr": run.config.lr}
    (run.folder / RESULT).write_text(json.dumps(content))


def test_every_cell_is_tried_at_every_rate_and_the_best_one_gets_all_seeds(tmp_path: Path) -> None:
    made = study(tmp_path)
    first = made.to_do(tmp_path)
    assert [(run.cell, run.config.lr, run.config.seed) for run in first] == [
        (cell, lr, 0) for cell in CELLS for lr in (1e-3, 1e-2)
    ]
    assert {run.config.steps for run in first} == {3}
    for run in first:
        best = 1e-2 if run.cell == "exact" else 1e-3
        finish(run, 2.0 if run.config.lr == best else 3.0)

    second = made.to_do(tmp_path)
    assert [(run.cell, run.config.lr, run.config.seed) for run in second] == [
        *(("exact", 1e-2, seed) for seed in (0, 1)),
        *(("pamm 1/16", 1e-3, seed) for seed in (0, 1)),
    ]
    assert {run.config.steps for run in second} == {6}
    assert {run.arm.config.seed for run in second} == {0, 1}, "draws follow the seed"
    for number, run in enumerate(second):
        finish(run, 2.0 + number / 10)
    assert made.is_over(tmp_path)

    exact, approximate = made.summary(tmp_path)
    assert (exact["lr"], exact["seeds"], exact["lr_at_edge"]) == (1e-2, 2, True)
    assert exact["perplexity"] == pytest.approx(20.5)
    assert exact["spread"] == pytest.approx(0.5**0.5)
    assert approximate["perplexity"] == pytest.approx(22.5)


def test_a_cell_with_a_rate_of_its_own_is_trained_at_that_alone(tmp_path: Path) -> None:
    own = {"pamm, known rate": {"method": "pamm", "ratio": "1/16", "lr": 3e-3}}
    made = study(tmp_path, cells=CELLS | own, more_lrs=2)
    (cell,) = own
    assert made.tuning(tmp_path, cell) == []
    assert {run.cell for run in made.to_do(tmp_path) if run.config.steps == 3} == {*CELLS}
    finals = made.final(tmp_path, cell)
    assert [(run.config.lr, run.config.seed) for run in finals] == [(3e-3, 0), (3e-3, 1)]
    assert {run.folder.name for run in finals} == {"lr-0.003_seed-0", "lr-0.003_seed-1"}


def test_a_rate_is_chosen_without_those_that_diverged_or_failed(tmp_path: Path) -> None:
    made = study(tmp_path, lrs=[1, 2, 4])
    runs = made.tuning(tmp_path, "exact")
    finish(runs[0], 3.0)
    finish(runs[1], None)
    assert made.best_lr(tmp_path, "exact") is None, "not all are over"
    runs[2].folder.mkdir(parents=True)
    (runs[2].folder / FAILED).write_text("out of memory")
    assert made.best_lr(tmp_path, "exact") == 1.0


def test_a_cell_whose_best_rate_is_at_the_edge_tries_the_next_one(tmp_path: Path) -> None:
    made = study(tmp_path, lrs=[1e-3, 2e-3, 4e-3], more_lrs=2, cells={"exact": CELLS["exact"]})
    best, tried = 3e-4, []
    for _ in range(4):
        runs = [run for run in made.to_do(tmp_path) if run.config.steps == 3]
        tried += [run.config.lr for run in runs]
        for run in runs:
            finish(run, 2 + abs(run.config.lr - best))
    assert tried == [1e-3, 2e-3, 4e-3, 5e-4, 2.5e-4]
    assert [run.config.lr for run in made.tuning(tmp_path, "exact")] == sorted(tried)
    finals = made.final(tmp_path, "exact")
    assert {run.config.lr for run in finals} == {2.5e-4}
    for run in finals:
        finish(run, 2.0)
    assert made.summary(tmp_path)[0]["lr_at_edge"], "no more than two were to be added"


def test_a_rate_within_the_grid_adds_none(tmp_path: Path) -> None:
    made = study(tmp_path, lrs=[1e-3, 2e-3, 4e-3], more_lrs=2)
    for run in made.to_do(tmp_path):
        finish(run, 2 + abs(run.config.lr - 2e-3))
    assert {run.config.lr for run in made.to_do(tmp_path)} == {2e-3}


@pytest.mark.parametrize("name", ["60m", "60m-figures"])
def test_the_studies_equal_bytes_are_the_nearest(name: str) -> None:
    made = Study.load(STUDIES / f"{name}.yaml")
    run, compared = made.longest(), 0
    for cell, values in made.cells.items():
        method, _, ratio = cell.partition(", bytes of pamm ")
        if ratio:
            budget = held(PammConfig("pamm", ratio), run)  # type: ignore[arg-type]
            assert values["ratio"] == ratio_for_bytes(method, budget, run), cell
            compared += 1
    assert compared in (2, 6)


def test_trainings_of_full_length_that_chose_the_rate_are_not_done_again(tmp_path: Path) -> None:
    made = study(tmp_path, tune_steps=None)
    for run in made.to_do(tmp_path):
        finish(run, run.config.lr)
    assert {run.config.seed for run in made.to_do(tmp_path)} == {1}


def test_one_rate_needs_no_choice(tmp_path: Path) -> None:
    made = study(tmp_path, lrs=[1e-2])
    assert {run.config.steps for run in made.to_do(tmp_path)} == {6}
    assert not made.tuning(tmp_path, "exact")


def test_the_longest_run_decides_how_many_tokens_are_needed(tmp_path: Path) -> None:
    cells = CELLS | {"long": {"method": "exact", "run": {"global_batch": 8}}}
    assert study(tmp_path, cells=cells).longest().tokens_per_step == 8 * 16


def test_a_file_as_a_person_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(values(tmp_path, cells="ratio", lrs=["1e-3"])))
    made = Study.load(path)
    assert made.lrs == (1e-3,)
    assert list(made.cells) == ["exact", "pamm 1/128", "pamm 1/256", "pamm 1/512"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"name": "../out"}, ["name is '../out'", "names a folder"]),
        ({"name": 7}, ["name is 7"]),
        ({"lrs": []}, ["lrs is []"]),
        ({"lrs": [0]}, ["lrs is 0", "above 0"]),
        ({"seeds": ["a"]}, ["seeds is 'a'"]),
        ({"cells": {}}, ["cells is empty"]),
        ({"cells": "rato"}, ["'rato'", "choose from ratio"]),
        ({"cells": {"a": 3}}, ["cell 'a' is 3"]),
        ({"cells": {"a": {"ratio": 0}}}, ["arm 'a'", "ratio is 0"]),
        ({"cells": {"a": {"run": {"lr": 1}}}}, ["run of cell 'a'", "without name"]),
        ({"cells": {"a": {"run": {"stpes": 1}}}}, ["'stpes'", "did you mean 'steps'"]),
        ({"cells": {"a b": {}, "a-b": {}}}, ["same folder name"]),
        ({"base": {"lr": 1}}, ["without name, arms, lr, seed"]),
        ({"tune_steps": 0}, ["tune_steps is 0"]),
        ({"keep_checkpoints": 1}, ["keep_checkpoints is 1"]),
        ({"keep_checkpoints": ["exakt"]}, ["keep_checkpoints is ['exakt']", "names of cells"]),
        ({"more_lrs": -1}, ["more_lrs is -1"]),
        ({"cell": {}}, ["no key 'cell'", "did you mean 'cells'"]),
    ],
)
def test_studies_that_are_refused(tmp_path: Path, change: dict[str, Any], parts: list[str]) -> None:
    (tmp_path / "study.json").write_text(json.dumps(values(tmp_path) | change))
    with pytest.raises(PammError) as caught:
        Study.load(tmp_path / "study.json")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*0m*.yaml")), ids=lambda path: path.stem)
def test_the_projects_own_studies_can_be_read(path: Path) -> None:
    made = Study.load(path)
    assert made.name == path.stem
    assert len(made.cells) >= 2
