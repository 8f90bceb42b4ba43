"""A run so small that a test can train it."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from pamm.config import PammConfig
from pamm.recipes.files import read_json_lines
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.settings import Arm
from pamm.recipes.stop import Stop

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "mixing")


def text(words: int = 4000) -> str:
    """Words in an order that repeats late."""
    return " ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(words))


def config(folder: Path, **changes: Any) -> PretrainConfig:
    """A run on a text in ``folder``: exact and PAMM, six steps."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text(text())
    made = PretrainConfig(
        name="tiny",
        text=(str(path),),
        vocabulary=300,
        model={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        arms=(
            Arm("exact", PammConfig(method="exact")),
            Arm("pamm-1/16", PammConfig("pamm", 1 / 16)),
        ),
        sequence_length=16,
        batch_size=4,
        steps=6,
        lr=1e-2,
        eval_every=2,
        eval_sequences=4,
        save_every=2,
    )
    return dataclasses.replace(made, **changes)


def lines(folder: Path) -> list[dict[str, Any]]:
    """An arm's metrics without times."""
    made = read_json_lines(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "seconds"} for line in made]


def quiet() -> Console:
    return Console(quiet=True)


class StopAfter(Stop):
    """Asks to stop after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    @property
    def asked(self) -> bool:
        self.left -= 1
        return self.left <= 0
