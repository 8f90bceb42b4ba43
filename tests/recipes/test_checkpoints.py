"""Which checkpoint a training goes on from."""

from pathlib import Path

import pytest

from pamm.errors import PammError
from pamm.recipes.checkpoints import last_checkpoint


def test_the_last_checkpoint_is_the_newest_that_is_whole(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) == (None, 0)
    for step, state in ((9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (11, '{"glob')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == (tmp_path / "checkpoint-10", 10)
    assert not (tmp_path / "checkpoint-11").exists()


def test_a_checkpoint_of_another_number_of_processes_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(step: int, states: int) -> Path:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        for name in range(states):
            (folder / f"rng_state_{name}.pth").touch()
        return folder

    def refused(now: int, newest: Path, states: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(now))
        before = sorted(tmp_path.iterdir())
        text = rf"{newest.name} has the states of {states} processes; there are {now} now\. Go on"
        with pytest.raises(PammError, match=text):
            last_checkpoint(tmp_path)
        assert sorted(tmp_path.iterdir()) == before

    one = write(10, 0)
    (one / "rng_state.pth").touch()
    refused(2, one, 1)
    write(20, 2)
    two = write(30, 2)
    refused(1, two, 2)
    refused(3, two, 2)
    half = write(40, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert last_checkpoint(tmp_path) == (two, 30)
    assert not half.exists()
