"""Processes that share the trainings of one folder: each takes an open one, until none is left.

A lock file in a training's folder says that it is being trained, so workers need no master.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console

from pamm.errors import ArmFailedError, said
from pamm.recipes.checkpoints import remove_checkpoints
from pamm.recipes.files import FAILED, lock, write_text
from pamm.recipes.stop import Stop

_PAUSE_S = 2.0  # between looks at what the others do
_SHARING = "PAMM_WORKERS_ON_DEVICE"


def raise_failed(failed: Sequence[Path]) -> None:
    """Raise ``ArmFailedError`` if there are files of trainings that failed."""
    if failed:
        last = failed[0].read_text().strip().splitlines()[-1].rstrip(".")
        raise ArmFailedError(
            f"{len(failed)} trainings failed; the first says in {failed[0]}: {last}. The same "
            "command tries them again.",
            exit_code=1,
        )


class Job(Protocol):
    """A training that a worker can take; ``studies.study.Run`` is one."""

    @property
    def folder(self) -> Path: ...
    @property
    def title(self) -> str: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def note(self) -> str: ...


J = TypeVar("J", bound=Job)


def work_off(
    to_do: Callable[[], list[J]],
    begin: Callable[[J], None],
    train: Callable[[J], bool],
    stop: Stop,
    keeps_checkpoints: Callable[[J], bool] = lambda job: False,
) -> int:
    """Take one job after the other until none is left; returns the exit code.

    Args:
        to_do: what can be trained now, by anybody.
        begin: writes down what the job is, or refuses it.
        train: does it; False if ``stop`` was asked before it was finished.
        stop: asked for by a signal.
        keeps_checkpoints: whether those of a finished job stay.
    """
    while not stop.asked:
        todo = to_do()
        if not todo:
            return 0
        if not any(_take(job, begin, train, keeps_checkpoints(job)) for job in todo):
            time.sleep(_PAUSE_S)
    return 130


def _take(
    job: J, begin: Callable[[J], None], train: Callable[[J], bool], keep_checkpoints: bool
) -> bool:
    """Do the job unless another worker does; returns whether it was ours."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with lock(job.folder / ".lock") as is_ours:
        if not is_ours or job.is_over:
            return False
        begin(job)
        start = time.monotonic()
        try:
            if not train(job):
                return True
            note = job.note
        except Exception as error:  # one that fails, out of memory say, does not stop the others
            write_text(job.folder / FAILED, traceback.format_exc())
            note = f"failed: {said(error)}"
        if not keep_checkpoints:
            remove_checkpoints(job.folder)
        line = f"{job.title}: {note} ({time.monotonic() - start:,.0f} s)"
        Console().print(line, markup=False, highlight=False, soft_wrap=True)
    return True


def _devices(workers: int | None) -> list[str | None]:
    """For each worker the GPU that it sees, or None."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    gpus = named.split(",")[:count] if named else [str(number) for number in range(count)]
    wanted = workers or max(1, len(gpus))
    return [gpus[number % len(gpus)] if gpus else None for number in range(wanted)]


def sharing() -> int:
    """How many workers take turns on this one's device; 1 outside of ``work``."""
    return int(os.environ.get(_SHARING, "1"))


def wait(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Until all have ended. Ctrl-C is passed on to them; returns whether there was one."""
    interrupted = False
    for process in processes:
        while True:
            try:
                process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                for each in processes:
                    each.send_signal(signal.SIGINT)
    return interrupted


def work(module: str, folder: Path, wanted: int | None) -> None:
    """Start workers, ``python -m MODULE FOLDER``, one for each GPU by default; wait for them."""
    devices = _devices(wanted)
    environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            env=environment
            | {_SHARING: str(devices.count(device))}
            | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device}),
            process_group=0,  # Ctrl-C reaches this process alone, and is passed on once
        )
        for device in devices
    ]
    interrupted = wait(workers)
    codes = [worker.returncode for worker in workers]
    if interrupted or 130 in codes:
        raise KeyboardInterrupt
    if bad := [code for code in codes if code]:
        raise ArmFailedError(
            f"a worker ended with exit code {bad[0]}. The same command goes on.",
            exit_code=2 if 2 in bad else 1,
        )
