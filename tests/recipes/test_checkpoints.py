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


def test_a_checkpoint_of_fewer_processes_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(step: int, *states: str) -> Path:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        for name in states:
            (folder / name).touch()
        return folder

    monkeypatch.setenv("WORLD_SIZE", "2")
    one = write(10, "rng_state.pth")
    with pytest.raises(PammError, match=r"checkpoint-10 does not have .* of 2 processes\. Go on"):
        last_checkpoint(tmp_path)
    assert one.exists()
    two, half = write(20, "rng_state_0.pth", "rng_state_1.pth"), write(30, "rng_state_0.pth")
    assert last_checkpoint(tmp_path) == (two, 20)
    assert two.exists()
    assert not half.exists()
