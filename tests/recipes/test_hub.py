import json
from pathlib import Path

import pytest

from pamm.errors import PammError
from pamm.recipes.hub import hub_texts
from pamm.recipes.tokens import prepare
from tests.recipes.helpers import config, quiet, text


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set as on the hub, but in a folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    for split, count in (("train", 30), ("validation", 5)):
        rows = [json.dumps({"text": f"{number} {text(200)}"}) for number in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    return f"hub:{folder}"


def test_texts_come_in_order(data_set: str) -> None:
    assert [each.split()[0] for each in hub_texts(f"{data_set}::validation")] == list("01234")


def test_as_much_is_read_as_the_run_needs(tmp_path: Path, data_set: str) -> None:
    made = config(tmp_path, text=(data_set,), validation=(f"{data_set}::validation",))
    tokens = prepare(made, tmp_path / "run", quiet())
    assert len(tokens.train) == 6 * 4 * 16
    assert len(tokens.validation) == 4 * 16
    longer = config(tmp_path, text=made.text, validation=made.validation, steps=10)
    assert len(prepare(longer, tmp_path / "run", quiet()).train) == 10 * 4 * 16
    with pytest.raises(PammError, match="not repeated"):
        prepare(config(tmp_path, **(vars(made) | {"steps": 10**4})), tmp_path / "run", quiet())


@pytest.mark.parametrize("name", ["hub:", "hub:a:b:c:d", "hub:/no/such/folder"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(PammError, match=name):
        list(hub_texts(name))


def test_validation_must_be_named(tmp_path: Path, data_set: str) -> None:
    with pytest.raises(PammError, match="nothing of it is held out"):
        prepare(config(tmp_path, text=(data_set,)), tmp_path / "run", quiet())
