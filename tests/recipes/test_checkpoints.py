"""Which checkpoint a training goes on from."""

from pathlib import Path

from pamm.recipes.checkpoints import last_checkpoint


def test_the_last_checkpoint_is_the_newest_that_is_whole(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) == (None, 0)
    for step, state in ((9, '{"global_step": 9}'), (10, '{"global_step": 10}'), (11, '{"glob')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == (tmp_path / "checkpoint-10", 10)
    assert not (tmp_path / "checkpoint-11").exists()
