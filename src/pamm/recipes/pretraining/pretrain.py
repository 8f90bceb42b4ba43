"""The main job: one model trained several times, differing in nothing but how inputs are kept.

runs/NAME/
    config.yaml               the run; another one in the same folder is refused
    tokenizer.json tokens.*   the text, tokenised once for all arms
    ARM/metrics.jsonl         every step and every validation
    ARM/tensorboard/          the same, for TensorBoard
    ARM/checkpoint-N/         of the Trainer; the last one is the trained model
    ARM/result.json           written when the arm is finished, which is then not run again
    loss.png memory.png report.html
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from pamm.errors import ArmFailedError, PammError
from pamm.extras import require
from pamm.recipes.files import CONFIG, RESULT, lock, write_text, writing_in
from pamm.recipes.pretraining.results import ArmResult, read_results, tables
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.ranks import processes
from pamm.recipes.settings import Arm
from pamm.recipes.workers import wait

_PREPARED = {"text.jsonl", "tokenizer.json", "tokens.bin", "tokens.json", "preparing.json", ".lock"}


def pretrain(config: PretrainConfig, output: Path, console: Console) -> list[ArmResult]:
    """Train all arms, or what is left of them, and write the report.

    Each arm runs in a process of its own. An interrupted one goes on from its last checkpoint and
    ends bit for bit where it would have ended otherwise; a finished one is not run again.

    Started by torchrun or ``accelerate launch``, all processes train every arm together, one device
    each, and the folder must be one that all of them see.

    Args:
        config: the run.
        output: folder of all runs; this one is in ``output / config.name``.
        console: shows the progress and the comparison.

    Raises:
        PammError: if something in the configuration or the text is wrong, or the folder belongs
            to another run. Nothing in it is touched then.
        ArmFailedError: if a training ended with an error.
        KeyboardInterrupt: once the current step's checkpoint is written.
    """
    folder = output / config.name
    config.accumulation(processes())
    if processes() > 1:
        from pamm.recipes.pretraining.together import train_together

        return train_together(config, folder, console)
    with open_run(config, folder):
        return train_arms(config, folder, console)


@contextlib.contextmanager
def open_run(config: PretrainConfig, folder: Path) -> Iterator[Path]:
    """The folder of a run, locked against a second process; a new one or that of the same run."""
    require("train", "transformers", "accelerate", "tokenizers", "tensorboard", "jinja2")
    require("plots", "matplotlib")
    if folder.exists() and not folder.is_dir():
        raise PammError(f"{folder} is a file; the run needs a folder of that name.")
    if (folder / CONFIG).exists():
        check_same(config, folder)
    elif folder.exists() and (others := _unknown(folder)):
        raise PammError(
            f"{folder} is not empty ({', '.join(others[:3])}) and no run of pamm. Choose another "
            "name or output folder."
        )
    with contextlib.ExitStack() as stack:
        with writing_in(folder):
            is_ours = stack.enter_context(lock(folder / ".lock"))
        if not is_ours:
            raise PammError(
                f"another process is at work on the run in {folder}. Wait until it ends, or choose "
                "another name."
            )
        yield folder


def train_arms(
    config: PretrainConfig, folder: Path, console: Console, lr_note: str = ""
) -> list[ArmResult]:
    """``pretrain`` in a folder that ``open_run`` gave; ``lr_note`` is for the report."""
    prepare_run(config, folder, console)
    for number, arm in enumerate(config.arms, start=1):
        if announce(config, number, folder, console):
            _run_arm(arm, folder)
    return finish(config, folder, console, lr_note)


def prepare_run(config: PretrainConfig, folder: Path, console: Console) -> None:
    """Tokens and configuration in the folder, or an error that leaves no configuration there."""
    from pamm.recipes.pretraining.model import llama_config
    from pamm.recipes.pretraining.tokens import prepare

    tokens = prepare(config, folder, console, begun=(folder / CONFIG).exists())
    llama_config(config, tokens)  # refuses a model that cannot be built
    if not (folder / CONFIG).exists():
        write_text(folder / CONFIG, config.to_yaml())
    seen = config.steps * config.tokens_per_step / len(tokens.train)
    console.print(
        f"{len(tokens.train):,} tokens to train on, {len(tokens.validation):,} to validate on, "
        f"vocabulary {tokens.vocabulary:,}; {config.steps:,} steps of "
        f"{config.tokens_per_step:,} tokens for each arm"
        + (f": every token is seen {seen:.1f} times" if seen > 1 else ""),
        highlight=False,
    )


def announce(config: PretrainConfig, number: int, folder: Path, console: Console) -> bool:
    """Print which arm is next; returns whether there is anything left to do for it."""
    arm = config.arms[number - 1]
    title = f"[{number}/{len(config.arms)}] {arm.name}"
    if (folder / arm.folder / RESULT).exists():
        console.print(f"{title}: finished before", markup=False, highlight=False)
        return False
    console.print(title, style="bold", markup=False, highlight=False)
    return True


def finish(
    config: PretrainConfig, folder: Path, console: Console, lr_note: str = ""
) -> list[ArmResult]:
    """Write the report, print the comparison."""
    from pamm.recipes.pretraining.page import write_report

    results = read_results(config, folder)
    written = write_report(config, folder, results, lr_note)
    console.print(tables(results))
    console.print(
        "One seed: small differences can be chance. Tokens/s are of this machine, as busy as it "
        "was. How each number was measured is in the report."
    )
    for path in written:
        console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)
    return results


def _run_arm(arm: Arm, folder: Path) -> None:
    environment = dict(os.environ)
    # One device: with several in sight the Trainer would split every batch over them.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # Threads that spin while they wait starve each other as soon as anything else runs: a step of
    # the demo took 4.4 s on two busy cores, 0.3 s with threads that sleep; 0.15 s either way on
    # idle ones.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    process = subprocess.Popen(
        [sys.executable, "-m", "pamm.recipes.pretraining.arm", str(folder), arm.folder],
        env=environment,
        close_fds=False,
        process_group=0,  # Ctrl-C reaches this process alone, and is passed on once
    )
    interrupted, code = wait([process]), process.returncode
    # Also where the arm had done its last step and ends as if nothing had been asked.
    if code in (130, -signal.SIGINT) or (interrupted and not code):
        raise KeyboardInterrupt
    if code:
        why = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        raise ArmFailedError(
            f"the training of {arm.name!r} {why}{hint}. The same command goes on from its last "
            "checkpoint.",
            exit_code=2 if code == 2 else 1,
        )


def check_same(config: PretrainConfig, folder: Path) -> None:
    """Raise unless the folder holds a run of this configuration."""
    there = _flat(PretrainConfig.load(folder / CONFIG).to_dict())
    wanted = _flat(config.to_dict())
    differing = [
        f"{key} ({there.get(key, 'none')} there, {wanted.get(key, 'none')} now)"
        for key in dict.fromkeys([*there, *wanted])
        if there.get(key) != wanted.get(key)
    ]
    if differing:
        raise PammError(
            f"{folder} holds a run of another configuration; these keys differ: "
            f"{', '.join(differing)}. Choose another name, or remove that folder. Nothing in it "
            "was changed."
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"arms": {"exact": {"lr": 1}}}`` as ``{"arms.exact.lr": 1}``."""
    flat = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _unknown(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    return [name for name in names if name.removesuffix(".partial") not in _PREPARED]
