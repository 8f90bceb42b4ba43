"""Two processes on the CPU, through the command line: torchrun and accelerate, DDP and FSDP2."""

import dataclasses
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pamm.recipes.files import read_json, read_json_lines
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import prepare
from pamm.recipes.pretraining.training import train_arm
from pamm.recipes.stop import Stop
from tests.recipes.helpers import config, lines, quiet

PROJECT = Path(__file__).parents[3]
STEPS = 16


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
# As a GPU's user has it from ``accelerate config``; with --cpu it would start one process alone.
ACCELERATE = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--mixed_precision=bf16", "--dynamo_backend=no"),
)


def start(
    made: PretrainConfig, folder: Path, module: str, launcher: tuple[str, ...] = TORCHRUN
) -> subprocess.Popen[str]:
    """``pamm pretrain`` in two processes."""
    folder.mkdir()
    (folder / "run.yaml").write_text(made.to_yaml())
    return again(folder, module, launcher)


def again(folder: Path, module: str, launcher: tuple[str, ...] = TORCHRUN) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *launcher, "-m", module, "pretrain", "--output", str(folder)]
    return subprocess.Popen(
        [*command, "--config", str(folder / "run.yaml")],
        cwd=PROJECT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kill_at(process: subprocess.Popen[str], metrics: Path, step: int) -> None:
    """SIGKILL for the launcher and both processes once ``step`` is logged."""
    end = time.monotonic() + 120
    while sum("loss" in line for line in read_json_lines(metrics)) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the run did not get going"
        time.sleep(0.005)
    family = psutil.Process(process.pid)
    for each in [family, *family.children(recursive=True)]:
        each.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "fsdp"), [("pamm", False), ("tests.recipes.pretraining.fsdp_on_cpu", True)]
)
def test_two_processes_train_what_one_would_and_survive_a_kill(
    tmp_path: Path, module: str, fsdp: bool
) -> None:
    made = config(
        tmp_path, steps=STEPS, batch_size=2, global_batch=8, save_every=3, eval_every=5, fsdp=fsdp
    )
    straight = start(made, tmp_path / "straight", module)
    output, _ = straight.communicate(timeout=120)
    assert straight.returncode == 0, output
    exact, approximate = (tmp_path / "straight/tiny" / arm.folder for arm in made.arms)
    assert read_json(exact / "result.json")["processes"] == 2
    assert (tmp_path / "straight/tiny/report.html").exists()
    assert (exact / "checkpoint-16/pytorch_model_fsdp.bin").exists() == fsdp

    # Exact training is that of one process, on the same batches.
    alone = tmp_path / "alone"
    tokens = prepare(made, alone, quiet())
    assert train_arm(made, made.arms[0], alone / "exact", tokens, quiet(), Stop())
    for ours, expected in zip(lines(exact), lines(alone / "exact"), strict=True):
        assert ours == pytest.approx(expected, rel=1e-4)

    step = random.randrange(1, STEPS - 1)
    only = config(tmp_path, **{**vars(made), "arms": made.arms[1:]})
    killed = start(only, tmp_path / "killed", module)
    kill_at(killed, tmp_path / "killed/tiny/pamm-1-16/metrics.jsonl", step)
    assert not (tmp_path / "killed/tiny/pamm-1-16/result.json").exists()
    resumed = again(tmp_path / "killed", module)
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output
    assert lines(tmp_path / "killed/tiny/pamm-1-16") == lines(approximate), f"killed at {step}"


@pytest.mark.slow
def test_accelerate_starts_the_processes_and_decides_nothing_else(tmp_path: Path) -> None:
    made = config(tmp_path, batch_size=2, global_batch=8, steps=3)
    made = dataclasses.replace(made, arms=made.arms[:1])
    together = start(made, tmp_path / "together", "pamm", ACCELERATE)
    output, _ = together.communicate(timeout=120)
    assert together.returncode == 0, output
    exact = tmp_path / "together/tiny/exact"
    assert read_json(exact / "result.json")["processes"] == 2
    tokens = prepare(made, tmp_path / "alone", quiet())
    assert train_arm(made, made.arms[0], tmp_path / "alone/exact", tokens, quiet(), Stop())
    for ours, expected in zip(lines(exact), lines(tmp_path / "alone/exact"), strict=True):
        assert ours == pytest.approx(expected, rel=1e-5), "in fp32"


def test_a_step_that_two_processes_cannot_share_is_refused(tmp_path: Path) -> None:
    process = start(config(tmp_path, global_batch=4), tmp_path / "run", "pamm")
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    message = "global_batch is 4; 2 process(es) with a batch_size of 4 need a multiple of 8"
    assert message in " ".join(output.split())
