import dataclasses
from pathlib import Path

import pytest

from pamm.config import PammConfig
from pamm.errors import PammError
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.studies import cells
from tests.recipes.helpers import config

FULL = ", full rate"


@pytest.fixture
def base(tmp_path: Path) -> PretrainConfig:
    """LLaMA 60M at the paper's 32,768 tokens in a forward pass."""
    return dataclasses.replace(
        config(tmp_path), model="llama-60m", batch_size=128, sequence_length=256, lr_factor=0.25
    )


def test_methods_are_compared_at_equal_bytes_or_more(base: PretrainConfig) -> None:
    made = cells.method(base)
    budgets = {
        f"pamm {ratio}": cells.held(PammConfig("pamm", ratio), base)  # type: ignore[arg-type]
        for ratio in cells.RATIOS
    }
    compared = {name: cell for name, cell in made.items() if ", bytes of " in name}
    assert len(compared) == 2 * 2 * len(cells.RATIOS)
    for name, cell in compared.items():
        budget = budgets[name.partition(", bytes of ")[2].removesuffix(FULL)]
        held = cells.held(PammConfig(cell["method"], cell["ratio"]), base)
        row = 2 * 512 if cell["method"] == "uniform_crs" else 2 * base.tokens_per_pass
        assert budget <= held < budget + row + 16, "no more than one row or feature above"


def test_methods_are_compared_at_the_runs_rate_and_at_the_full_one(base: PretrainConfig) -> None:
    made = cells.method(base)
    lowered = {name for name, cell in made.items() if "lr_factor" not in cell} - {"exact"}
    assert len(lowered) == 3 * len(cells.RATIOS), "PAMM, Uniform-CRS and CompAct"
    for name in lowered:
        assert made[name + FULL] == {**made[name], "lr_factor": 1.0}
    assert made["exact, q/k/v rate x 0.25"] == {"method": "exact", "lr_factor": 0.25}
    for name in ("subspace 1/8", "subspace 3/8", "default"):
        assert made[name]["lr_factor"] == 1.0
        assert name + FULL not in made

    alike = cells.method(dataclasses.replace(base, lr_factor=1.0))
    assert {*alike} == {name for name in made if not name.endswith((FULL, "x 0.25"))}


def test_shapes_are_the_papers_and_keep_the_tokens_of_a_pass(base: PretrainConfig) -> None:
    made = cells.shape(base)
    assert len(made) == 2 * 7
    for name, cell in made.items():
        run = dataclasses.replace(base, **cell["run"])
        assert run.tokens_per_pass == base.tokens_per_pass
        assert name.endswith(f"{run.sequences_per_step} x {run.sequence_length}")
        assert run.accumulation(1) == run.tokens_per_step // base.tokens_per_pass


def test_tolerances_go_from_zero_to_infinity_at_every_ratio(base: PretrainConfig) -> None:
    configs = [PammConfig(**cell) for cell in cells.tolerance(base).values()]
    assert len(configs) == 3 * 7
    assert {each.tolerance for each in configs} >= {0.0, 1.0, None}


def test_several_studies_share_their_cells(base: PretrainConfig) -> None:
    both = cells.cells(["ratio", "method"], base)
    assert list(both)[:2] == ["exact", "exact, q/k/v rate x 0.25"]
    assert len(both) == len(cells.method(base))


@pytest.mark.parametrize("names", ["ratios", ["ratio", "x"], 3])
def test_unknown_studies_are_refused(base: PretrainConfig, names: object) -> None:
    with pytest.raises(PammError, match="choose from ratio, shape, tolerance, method"):
        cells.cells(names, base)


def test_bytes_out_of_reach_are_refused(base: PretrainConfig) -> None:
    with pytest.raises(PammError, match="at any ratio"):
        cells.ratio_for_bytes("pamm", 10**12, base)
