"""When metrics are written: at once on the CPU, seldom on an accelerator, always before a save."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pamm.recipes.pretraining.callbacks import MetricsCallback
from tests.recipes.helpers import lines


class Trainer:
    """Calls the callback as the Trainer does, on a device of this kind."""

    def __init__(self, path: Path, device: str, resumed: int = 0) -> None:
        self.args: Any = SimpleNamespace(device=torch.device(device))
        self.step, self.seen = resumed, []
        self.callback = MetricsCallback(
            path, 8, resumed, lambda: torch.tensor(float(self.step)), [self.seen.append]
        )

    def train(self, **asked: bool) -> None:
        """One step; ``asked`` is what others want after it."""
        flags = dict.fromkeys(("should_save", "should_evaluate", "should_training_stop"), False)
        control: Any = SimpleNamespace(**flags | asked)
        schedule = SimpleNamespace(get_last_lr=lambda: [0.5])
        state: Any = SimpleNamespace(global_step=self.step)
        self.callback.on_step_begin(self.args, state, control, lr_scheduler=schedule)
        self.step = state.global_step = self.step + 1
        self.callback.on_step_end(self.args, state, control)

    def close(self) -> None:
        none: Any = None
        self.callback.on_train_end(none, none, none)

    def validate(self) -> None:
        state: Any = SimpleNamespace(global_step=self.step)
        none: Any = None
        self.callback.on_log(self.args, state, none, logs={"eval_loss": 0.0})


def test_a_line_is_there_at_once_on_the_cpu(tmp_path: Path) -> None:
    with closing(Trainer(tmp_path / "metrics.jsonl", "cpu")) as made:
        for step in (1, 2):
            made.train()
            assert [line["step"] for line in lines(tmp_path)] == [*range(1, step + 1)]
    assert lines(tmp_path)[1] == {"step": 2, "loss": 2.0, "lr": 0.5, "tokens": 16}
    assert lines(tmp_path) == [{**line} for line in made.seen if line.pop("seconds") > 0]


@pytest.mark.parametrize("why", ["should_save", "should_evaluate", "should_training_stop"])
def test_losses_stay_on_an_accelerator_until_they_are_needed(tmp_path: Path, why: str) -> None:
    with closing(Trainer(tmp_path / "metrics.jsonl", "cuda")) as made:
        made.train()
        made.train()
        assert lines(tmp_path) == []
        made.train(**{why: True})
        expected = [(1, 1), (2, 2), (3, 3)]
        assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == expected
        made.validate()
    assert lines(tmp_path)[-1] == {"step": 3, "eval_loss": 0.0, "perplexity": 1.0}
    seconds = [line["seconds"] for line in made.seen[:3]]
    assert seconds == pytest.approx([seconds[0] * n for n in (1, 2, 3)], abs=2e-6)


def test_losses_are_read_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pamm.recipes.pretraining.callbacks._UNREAD_S", 0.0)
    with closing(Trainer(tmp_path / "metrics.jsonl", "cuda")) as made:
        made.train()
        assert len(lines(tmp_path)) == 1
