"""Every type of model in Transformers does what docs/models.md says."""

import pytest
from transformers import logging

from tests.sweep.check import outcome
from tests.sweep.page import read
from tests.sweep.tiny import KINDS

EXPECTED = read()
CASES = [(kind, name) for kind, names in KINDS.items() for name in sorted(names)]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.set_verbosity(logging.CRITICAL)


@pytest.mark.filterwarnings("ignore")  # those of the models are not ours
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_converts_and_trains_as_the_page_says(kind: str, name: str) -> None:
    expected = EXPECTED[kind].get(name)
    assert outcome(kind, name) == expected, "python -m tests.sweep writes the page anew"


def test_the_page_has_every_type_and_no_failure() -> None:
    assert {kind: set(names) for kind, names in KINDS.items()} == {
        kind: set(lines) for kind, lines in EXPECTED.items()
    }
    assert not [line for lines in EXPECTED.values() for line in lines.values() if "FAILED" in line]


def test_at_least_140_causal_language_models_run() -> None:
    lines = EXPECTED["causal-lm"].values()
    assert sum(not line.startswith("not tried") for line in lines) >= 140
