"""The demo: the main job on text that every machine has, in about four minutes on two CPU cores."""

from pathlib import Path

from rich.console import Console

from pamm.config import PammConfig
from pamm.recipes.console import progress_bar
from pamm.recipes.files import write_text
from pamm.recipes.pretraining.pretrain import open_run, train_arms
from pamm.recipes.pretraining.results import ArmResult
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.settings import Arm
from pamm.recipes.text.python import module_files, python_text

LR_NOTE = (
    "the best for exact training of 0.001, 0.002, 0.004, 0.008 and 0.016 "
    "(benchmarks/results/demo_learning_rate.jsonl)"
)


def demo_config(name: str, text: Path) -> PretrainConfig:
    """The run: small, and every arm at the learning rate that was best for exact training."""
    return PretrainConfig(
        name=name,
        text=(str(text),),
        vocabulary=2048,
        model={
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
        arms=(
            Arm("exact", PammConfig(method="exact")),
            Arm("pamm-1/128", PammConfig("pamm", 1 / 128)),
            Arm("pamm-1/512", PammConfig("pamm", 1 / 512)),
            Arm("uniform-crs-1/128", PammConfig(method="uniform_crs", ratio=1 / 128)),
        ),
        steps=200,
        lr=2e-3,
        eval_every=50,
        eval_sequences=64,
        save_every=50,
    )


def demo(name: str, output: Path, console: Console) -> list[ArmResult]:
    """Write the text if it is not there yet, then train all arms; see ``pretrain``."""
    folder = output / name
    text = folder / "text.jsonl"
    config = demo_config(name, text)
    with open_run(config, folder):
        write_demo_text(text, console)
        return train_arms(config, folder, console, LR_NOTE)


def write_demo_text(path: Path, console: Console) -> None:
    """Write Python's documentation as JSON lines, unless the file is there already."""
    if path.exists():
        return
    files = module_files()
    with progress_bar(console, "reading Python's documentation", len(files)) as advance:
        write_text(path, python_text(files, advance))
