"""The whole job through the command line: interrupted, resumed, finished, and asked for again."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from pamm.config import PammConfig
from pamm.errors import ArmFailedError, PammError
from pamm.recipes.files import read_json, read_json_lines
from pamm.recipes.pretraining import pretrain
from pamm.recipes.pretraining.demo import demo_config
from pamm.recipes.pretraining.pretrain import open_run
from pamm.recipes.pretraining.results import COLUMNS, ArmResult, read_results, rows, tables
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import prepare
from pamm.recipes.pretraining.training import train_arm
from pamm.recipes.settings import Arm
from pamm.recipes.stop import Stop
from tests.recipes.helpers import config, quiet


def start(folder: Path, output: Path) -> subprocess.Popen[str]:
    # Where the tests run as a background job SIGINT is ignored, and what they start inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "pamm", "pretrain", "--config", str(folder / "run.yaml")]
    return subprocess.Popen(
        [*command, "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )


def wait_for_steps(path: Path, steps: int) -> None:
    end = time.monotonic() + 120
    while len(read_json_lines(path)) < steps:
        assert time.monotonic() < end, "the run did not get going"
        time.sleep(0.01)


def test_interrupt_resume_finish_and_ask_again(tmp_path: Path) -> None:
    made = config(tmp_path, steps=120, save_every=40, eval_every=60)
    (tmp_path / "run.yaml").write_text(made.to_yaml())
    folder = tmp_path / "runs" / "tiny"

    first = start(tmp_path, tmp_path / "runs")
    wait_for_steps(folder / "exact/metrics.jsonl", 4)
    with pytest.raises(PammError, match="another process is at work"), open_run(made, folder):
        pass
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 130, output
    assert "the same command goes on" in output
    assert "Traceback" not in output
    assert list((folder / "exact").glob("checkpoint-*"))
    assert not (folder / "exact/result.json").exists(), "it had ended before it was interrupted"
    assert not (folder / "report.html").exists()

    second = start(tmp_path, tmp_path / "runs")
    output, _ = second.communicate(timeout=120)
    assert second.returncode == 0, output
    for expected in (*COLUMNS[1:], "pamm-1/16", "loss.png", "memory.png", "report.html"):
        assert expected in output
    (tmp_path / "straight").mkdir()
    tokens = prepare(made, tmp_path / "straight", quiet())
    straight_folder = tmp_path / "straight/exact"
    assert train_arm(made, made.arms[0], straight_folder, tokens, quiet(), Stop())
    straight, resumed = (
        load_file(base / "exact/checkpoint-120/model.safetensors")
        for base in (tmp_path / "straight", folder)
    )
    assert all(torch.equal(value, straight[name]) for name, value in resumed.items())

    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page, "the report needs no other file"
    for cell in (cell for row in rows(read_results(made, folder)) for cell in row):
        assert cell in page
    for arm in ("exact", "pamm-1-16"):
        assert read_json(folder / arm / "result.json")["steps"] == 120
        assert any((folder / arm / "tensorboard").iterdir())
    assert PretrainConfig.load(folder / "config.yaml") == made

    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*")}
    third = start(tmp_path, tmp_path / "runs")
    output, _ = third.communicate(timeout=60)
    assert third.returncode == 0, output
    assert output.count("finished before") == 2
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*")} == before


def test_an_interrupt_in_the_last_step_of_an_arm_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arm ends as if nothing had been asked; the next one must not begin."""

    class Arms:
        begun, returncode = 0, 0

        def __init__(self, *args: object, **kwargs: object) -> None:
            Arms.begun += 1
            self.signals: list[int] = []

        def wait(self) -> int:
            if not self.signals:
                raise KeyboardInterrupt
            return 0

        def send_signal(self, number: int) -> None:
            self.signals.append(number)

    made = config(tmp_path)
    monkeypatch.setattr(pretrain.subprocess, "Popen", Arms)
    with pytest.raises(KeyboardInterrupt):
        pretrain.pretrain(made, tmp_path / "runs", quiet())
    assert Arms.begun == 1


def test_a_folder_of_another_run_is_refused_and_not_touched(tmp_path: Path) -> None:
    with open_run(config(tmp_path), tmp_path / "run") as folder:
        (folder / "config.yaml").write_text(config(tmp_path).to_yaml())
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    arms = (config(tmp_path).arms[0], Arm("pamm-1/16", PammConfig("pamm", 1 / 8)))
    with pytest.raises(PammError) as caught:
        open_run(config(tmp_path, steps=7, arms=arms), folder).__enter__()
    expected = "arms.pamm-1/16.ratio (0.0625 there, 0.125 now), steps (6 there, 7 now)."
    assert f"these keys differ: {expected} Choose another name" in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_an_error_of_the_training_is_not_taken_for_one_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space"), open_run(config(tmp_path), tmp_path / "run"):
        raise OSError("no space left")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    (tmp_path / "file").write_text("")
    with pytest.raises(PammError, match=r"not empty \(cat.jpg\)"):
        open_run(config(tmp_path), tmp_path / "photos").__enter__()
    with pytest.raises(PammError, match="is a file"):
        open_run(config(tmp_path), tmp_path / "file").__enter__()


def test_a_run_can_begin_again_after_its_preparation_failed(tmp_path: Path) -> None:
    """A configuration is only fixed once it is known to work."""
    with open_run(config(tmp_path), tmp_path / "run") as folder, pytest.raises(PammError):
        prepare(config(tmp_path, sequence_length=10**6), folder, quiet())
    with open_run(config(tmp_path, vocabulary=280), tmp_path / "run") as folder:
        assert prepare(config(tmp_path, vocabulary=280), folder, quiet()).vocabulary == 280


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (2, 2), (-9, 1)])
def test_an_arm_that_fails_says_how_and_that_the_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int
) -> None:
    ending = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"exit({code})"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{ending}'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(pretrain.sys, "executable", str(fake))
    with pytest.raises(ArmFailedError, match="goes on from its last checkpoint") as caught:
        pretrain._run_arm(config(tmp_path).arms[0], tmp_path)
    assert caught.value.exit_code == exit_code
    assert ("out of memory" in str(caught.value)) == (code == -9)


def result(name: str, perplexity: float | None, held: int) -> ArmResult:
    return ArmResult(
        name=name,
        folder=name,
        method="exact" if name == "exact" else "pamm",
        validation_loss=1.0,
        perplexity=perplexity,
        tokens_per_second=12345.6,
        held_bytes=held,
        predicted_bytes=held,
        paper_bytes=None,
        peak_bytes=1 << 30,
        steps=1,
        tokens=1,
        parameters=1,
        groups=1,
        lr=1.0,
        lr_factor=1.0,
        precision="fp32",
        processes=1,
        device="",
        device_type="cpu",
        versions={},
    )


def test_differences_are_shown_with_their_sign() -> None:
    results = [result("exact", 100.0, 1000), result("worse", 110.0, 10), result("better", 95.0, 10)]
    exact, worse, better = (dict(zip(COLUMNS, row, strict=True)) for row in rows(results))
    assert exact["against exact"] == exact["saved"] == ""
    assert (worse["against exact"], better["against exact"]) == ("+10.0%", "-5.0%")
    assert worse["saved"] == "99.0%"
    assert worse["tokens/s"] == "12,346"


def test_a_comparison_without_exact_or_without_a_finite_loss() -> None:
    (row,) = rows([result("pamm", None, 10)])
    cells = dict(zip(COLUMNS, row, strict=True))
    assert cells["validation perplexity"] == "not finite"
    assert cells["against exact"] == cells["saved"] == ""
    compared = rows([result("exact", None, 10), result("pamm", 5.0, 10)])
    assert compared[1][2] == ""


@pytest.mark.parametrize("arms", [1, 4, 5, 10])
def test_tables_fit_a_terminal_and_cut_no_number(arms: int) -> None:
    results = [result("exact", 100.0, 1 << 30)]
    results += [result(f"uniform-crs-1/{n}", 1234.5, 123 << 20) for n in range(1, arms)]
    console = Console(width=80, file=io.StringIO())
    console.print(tables(results))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("12,346") == arms
    assert text.count("1,234.50") == text.count("+1134.5%") == arms - 1
    assert text.count("validation perplexity") == -(-arms // 4)
    assert "…" not in text


def test_the_demo_compares_like_with_like(tmp_path: Path) -> None:
    made = demo_config("demo", tmp_path / "text.jsonl")
    assert [arm.folder for arm in made.arms] == [
        "exact",
        "pamm-1-128",
        "pamm-1-512",
        "uniform-crs-1-128",
    ]
    assert {made.lr_of(arm) for arm in made.arms} == {made.lr}
    assert {made.lr_factor_of(arm) for arm in made.arms} == {1.0}
    assert PretrainConfig.from_dict(made.to_dict()) == made
