"""A run whose blocks are compiled: the same training, and each kind of block compiled once."""

from pathlib import Path

import pytest
from torch._dynamo.utils import counters

from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import prepare
from pamm.recipes.pretraining.training import train_arm
from pamm.recipes.stop import Stop
from tests.recipes.helpers import config, lines, quiet

pytestmark = pytest.mark.filterwarnings("default")


def run(folder: Path, made: PretrainConfig) -> list[float]:
    tokens, arm = prepare(made, folder, quiet()), made.arms[-1]
    assert train_arm(made, arm, folder / arm.folder, tokens, quiet(), Stop())
    return [value for line in lines(folder / arm.folder) for value in line.values()]


def test_a_compiled_run_is_the_plain_one(tmp_path: Path) -> None:
    made = config(tmp_path)
    plain = run(tmp_path / "plain", made)
    counters.clear()
    compiled = run(tmp_path / "compiled", config(tmp_path, compile=True))
    assert compiled == pytest.approx(plain, rel=1e-3)
    # Block and loss, in training and in validation, whatever the number of blocks.
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]
