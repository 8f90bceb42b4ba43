"""Every example runs to its end, as a user would start it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "accelerate_loop": "accelerate",
    "lightning_module": "lightning",
    "torchtitan_override": "torchtitan",
    "transformers_trainer": "transformers",
    "trl_sft": "trl",
}
DDP = ("--num_processes", "2")
FSDP2 = (
    *(*DDP, "--use_fsdp", "--fsdp_version", "2"),
    *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
)


def run(*command: str) -> str:
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs_and_prints_what_it_converted(name: str) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    assert "2 groups converted" in run(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("options", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_the_loop_on_two_processes(options: tuple[str, ...]) -> None:
    launch = (
        *("-m", "accelerate.commands.launch", "--mixed_precision", "no"),
        *("--num_machines", "1", "--dynamo_backend", "no", "--main_process_port", "0"),
    )
    out = run(*launch, *options, str(EXAMPLES / "accelerate_loop.py"))
    assert out.count("2 groups converted") == 1
    assert "step 8: loss" in out


@pytest.mark.parametrize("name", ["finetune_glue", "finetune_vlm"])
def test_an_example_without_its_arguments_says_which(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "required: model, data" in done.stderr


def test_every_example_is_tested() -> None:
    elsewhere = ("lora", "finetune")  # test_lora_scripts, recipes/test_glue
    ours = {path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith(elsewhere)}
    assert ours == set(NEEDS)
