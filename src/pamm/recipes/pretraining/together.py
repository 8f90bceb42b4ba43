"""A run in all the processes that torchrun or ``accelerate launch`` started."""

import contextlib
import time
from pathlib import Path

from rich.console import Console

from pamm.recipes.pretraining.pretrain import (
    CONFIG,
    announce,
    check_same,
    finish,
    open_run,
    prepare_run,
)
from pamm.recipes.pretraining.results import ArmResult, read_results
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.ranks import rank
from pamm.recipes.stop import Stop


def train_together(config: PretrainConfig, folder: Path, console: Console) -> list[ArmResult]:
    """``pretrain`` in one of several processes; the first one prepares and reports.

    Arms follow one another in the same processes. Ctrl-C, or the end of the launcher, stops all of
    them after the same step, with a checkpoint.
    """
    stop = Stop()
    stop.listen()
    is_first = rank() == 0
    console = console if is_first else Console(quiet=True)
    with open_run(config, folder) if is_first else contextlib.nullcontext():
        if is_first:
            prepare_run(config, folder, console)
        else:
            _wait_for(folder / CONFIG)
            check_same(config, folder)
        _train(config, folder, console, stop)
        return finish(config, folder, console) if is_first else read_results(config, folder)


def _train(config: PretrainConfig, folder: Path, console: Console, stop: Stop) -> None:
    from pamm.recipes.pretraining.tokens import Tokens
    from pamm.recipes.pretraining.training import train_arm

    tokens = Tokens.open(folder)
    for number, arm in enumerate(config.arms, start=1):
        if announce(config, number, folder, console) and not train_arm(
            config, arm, folder / arm.folder, tokens, console, stop
        ):
            raise KeyboardInterrupt


def _wait_for(path: Path) -> None:
    """Until the first process has written it. Should that fail, the launcher ends this one."""
    while not path.exists():
        time.sleep(0.2)
