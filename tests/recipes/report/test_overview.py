import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.recipes.files import write_json
from pamm.recipes.report import tables
from pamm.recipes.report.collect import Found, Outcome, Progress, _training, collect, size_of
from pamm.recipes.report.overview import write_overview
from pamm.recipes.report.pictures import pictures
from pamm.recipes.settings import Arm
from pamm.recipes.table import Table
from tests.recipes.helpers import config


@pytest.fixture
def base(tmp_path: Path) -> Outcome:
    """Exact training of a 60M model."""
    made = config(tmp_path, model="llama-60m", arms=(Arm("exact", PammConfig("exact")),))
    return Outcome(
        source="study", name="exact", size=size_of(made), config=made, lr=1e-3, lr_factor=1.0,
        seeds=3, perplexity=40.0, spread=0.1, tokens_per_second=1000.0, held_bytes=1 << 28,
        predicted_bytes=1 << 28, paper_bytes=None, device="GPU", processes=1, tuned=True,
        at_edge=False, curve=[(10, 5.0), (20, 3.7)], training=[(1, 6.0), (2, 5.5)],
    )  # fmt: skip


def variant(base: Outcome, name: str, perplexity: float, **changes: Any) -> Outcome:
    """Another training: keys of ``PammConfig``, of the run (``run``) and of the outcome."""
    of_run, targets = changes.pop("run", {}), changes.pop("targets", "attention")
    of_outcome = {
        key: changes.pop(key) for key in list(changes) if key in vars(base) and key != "config"
    }
    arm = Arm(name, PammConfig(**{"method": "pamm", **changes}), targets=targets)
    made = dataclasses.replace(base.config, arms=(arm,), **of_run)
    return dataclasses.replace(base, name=name, perplexity=perplexity, config=made, **of_outcome)


def cells(table: Table) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_the_papers_row_stands_beside_the_same_training_and_no_other(base: Outcome) -> None:
    outcomes = [
        base,
        variant(base, "slow", 41.0, method="exact", lr_factor=0.25),
        variant(base, "pamm", 44.0, ratio=1 / 512, at_edge=True, lr_factor=0.25),
        variant(base, "strict", 60.0, ratio=1 / 512, tolerance=0.5),
        variant(base, "compact", 50.0, method="compact", ratio=1 / 512),
        variant(base, "gate", 44.0, ratio=1 / 512, targets="mlp", lr_factor=0.25),
        dataclasses.replace(variant(base, "nan", 1.0, ratio=1 / 4), perplexity=None),
    ]
    made = cells(tables.results_table(outcomes))
    assert made["exact"]["perplexity"] == "40.00 ± 0.1"
    assert made["exact"]["paper: perplexity"] == "30.97"
    assert made["exact"]["against exact"] == made["exact"]["paper: against exact"] == ""
    assert made["pamm"]["against exact"] == "+10.0%"
    assert made["pamm"]["paper: perplexity"] == "32.53 ± 0.05"
    assert made["pamm"]["paper: against exact"] == "+5.0%"
    assert made["pamm"]["paper: memory"] == "3.5 MiB"
    assert made["pamm"]["learning rate"] == "0.001, q/k/v x 0.25 (edge)"
    assert made["gate"]["learning rate"] == "0.001, gate/up x 0.25"
    assert tables.ratio_name(outcomes[5]) == "pamm on gate/up, gate/up rate x 0.25"
    whole = variant(base, "some", 41.0, method="sampled", directions=64)
    assert tables.ratio_name(whole) == "sampled, 64 directions"
    for name in ("slow", "strict", "compact", "gate", "nan"):
        assert made[name]["paper: perplexity"] == ""
    unseen = variant(base, "unseen", 41.0, method="sampled", held_bytes=0, predicted_bytes=64)
    nothing = variant(base, "nothing", 41.0, method="recompute", held_bytes=0, predicted_bytes=0)
    made |= cells(tables.results_table([base, unseen, nothing]))
    held = [made[name]["held, measured"] for name in ("exact", "unseen", "nothing")]
    assert held == ["256.00 MiB", "64 B (computed)", "0 B"]
    assert made["nan"]["perplexity"] == "not finite"
    assert made["slow"]["against exact"] == "+2.5%"


def test_the_papers_own_memory_is_its_formula() -> None:
    """b = 32,768 tokens a device, bf16: exact 2 b n a layer, PAMM 3 k n 2 + 8 b."""
    shapes = {"60M": (512, 8), "350M": (1024, 24), "1B": (2048, 24)}
    for size, (n, layers) in shapes.items():
        for row in tables.paper()["pretrain"]["sizes"][size]["rows"]:
            b = 32_768
            ratio = PammConfig("pamm", row.get("ratio", 1)).ratio
            held = 2 * b * n if row["method"] == "exact" else 6 * ratio * b * n + 8 * b
            assert layers * held == row["memory_mb"] * 2**20


def test_a_cell_that_only_chose_its_rate_is_told(base: Outcome) -> None:
    """At the best of its rates, against exact training of that length."""
    tuning = {
        "exact": [(0.001, math.log(20.0)), (0.002, math.log(22.0)), (0.004, math.log(30.0))],
        "pamm": [(0.001, math.log(24.0)), (0.002, math.log(23.0)), (0.004, math.log(25.0))],
        "open": [],
    }
    rows = cells(tables.tuning_table([base], Progress(tuning, tune_steps=100, left=1)))
    assert list(rows) == ["exact", "pamm"]
    assert rows["exact"]["best"] == "0.001 (edge)"
    assert rows["exact"]["against exact"] == ""
    pamm = {"best": "0.002", "perplexity there": "23.00", "against exact": "+15.0%"}
    assert rows["pamm"].items() >= pamm.items()


def test_shapes_are_compared_row_by_row(base: Outcome) -> None:
    outcomes = []
    for batch, exact, approximate in ((512, 30.0, 33.0), (8, 50.0, 50.5)):
        run = {"global_batch": batch, "sequence_length": 256}
        outcomes.append(variant(base, f"exact {batch}", exact, method="exact", run=run))
        outcomes.append(variant(base, f"pamm {batch}", approximate, run=run))
    assert tables.is_shape_study(outcomes)
    assert set(pictures("s", outcomes, {})) == {"s shape"}
    made = cells(tables.shape_table(outcomes))
    assert (made["512"]["change"], made["512"]["paper: change"]) == ("+10.0%", "+4.8%")
    assert (made["8"]["change"], made["8"]["paper: change"]) == ("+1.0%", "")


def test_speeds_of_the_same_size_are_side_by_side(base: Outcome) -> None:
    fast = variant(base, "pamm", 1.0, ratio=1 / 512, tokens_per_second=1100.0)
    (row,) = cells(tables.throughput_table([base, fast])).values()
    assert (row["change"], row["paper: change"]) == ("+10.0%", "-19.7%")
    other = [dataclasses.replace(each, size="9M") for each in (base, fast)]
    (row,) = cells(tables.throughput_table(other)).values()
    assert (row["change"], row["paper: change"]) == ("+10.0%", "")


def test_speeds_of_trainings_that_shared_a_device_are_not_told(base: Outcome) -> None:
    shared = dataclasses.replace(base, tokens_per_second=None)
    pamm = variant(shared, "pamm", 1.0, ratio=1 / 512)
    assert not tables.throughput_table([shared, pamm]).rows
    assert cells(tables.results_table([shared, pamm]))["pamm"]["tokens/s"] == ""
    assert "s time" not in pictures("s", [shared, pamm], {})


def test_scaling_is_against_one_device_with_the_same_pass(base: Outcome) -> None:
    two = variant(base, "exact", 1.0, method="exact", processes=2, tokens_per_second=1800.0)
    four = variant(two, "exact", 1.0, method="exact", processes=4, run={"fsdp": True})
    other = variant(two, "exact", 1.0, method="exact", run={"batch_size": 2})
    rows = tables.scaling_table([base, two, four, other]).rows
    assert [row[3] for row in rows] == ["DDP", "FSDP2", "DDP"]
    assert [row[-1] for row in rows] == ["90.0%", "45.0%", ""]


def test_sizes_that_were_not_run_are_told(base: Outcome) -> None:
    made = tables.missing_table([base])
    assert {row[0] for row in made.rows} == {"350M", "1B", "7B"}


def test_pictures_are_those_that_the_results_give(base: Outcome) -> None:
    assert set(pictures("s", [base], {})) == {"s loss", "s training"}
    ratios = [base, *(variant(base, f"{n}", 50 - n, ratio=1 / n) for n in (2, 4))]
    curves = {"s loss", "s training", "s time"}
    assert set(pictures("s", ratios, {"exact": [(1e-3, 4.0)]})) == curves | {"s ratio", "s rates"}
    methods = [base, variant(base, "a", 50), variant(base, "b", 60, method="compact")]
    assert set(pictures("s", methods, {})) == curves | {"s bytes"}
    over = [variant(base, f"{e}", 50, tolerance=e) for e in (0.0, 1.0, None)]
    assert set(pictures("s", over, {})) == curves | {"s tolerance"}


def test_a_training_curve_is_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pamm.recipes.report.collect._POINTS", 2)
    lines: list[dict[str, Any]] = [{"step": n, "loss": float(n)} for n in (1, 2, 3, 4)]
    lines.insert(2, {"step": 2, "eval_loss": 9.0})
    lines.append({"step": 5, "loss": None})
    assert _training(lines) == [(2, 1.5), (4, 3.5)]


def test_two_sources_of_one_name_stay_apart(base: Outcome) -> None:
    found = Found([], {}, {}, {})
    assert [found.add([base]) for _ in range(3)] == ["study", "study (2)", "study (3)"]
    assert list(tables.by_source(found.outcomes)) == ["study", "study (2)", "study (3)"]


def test_two_analyses_of_one_name_keep_their_pictures(tmp_path: Path) -> None:
    values = {"checkpoint": "c", "tokens": 8, "draws": 2, "device": "cpu", "delta": 0.1}
    for run in ("one", "two"):
        folder = tmp_path / run / "analysis"
        folder.mkdir(parents=True)
        write_json(folder / "analysis.json", {**values, "bound": []})
        (folder / "pca.png").write_bytes(run.encode())
    *_, one, two = write_overview([tmp_path], tmp_path / "docs")
    assert (one.name, one.read_bytes()) == ("analysis-pca.png", b"one")
    assert (two.name, two.read_bytes()) == ("analysis-2-pca.png", b"two")


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PammError, match="no results of pamm"):
        collect([tmp_path])
    with pytest.raises(PammError, match="no such folder"):
        write_overview([tmp_path / "none"], tmp_path / "docs")
