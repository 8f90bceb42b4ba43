"""A study through the command line: stopped, gone on with, extended, reported."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pamm.cli import app
from pamm.errors import ArmFailedError, PammError
from pamm.recipes.files import FAILED, read_json
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import Tokens
from pamm.recipes.pretraining.training import train_arm
from pamm.recipes.report.collect import collect
from pamm.recipes.stop import Stop
from pamm.recipes.studies import ablate as module
from pamm.recipes.studies.ablate import ablate
from tests.recipes.helpers import lines, quiet
from tests.recipes.studies.test_study import study, values

CELLS = {
    "exact": {"method": "exact"},
    "exact, slow": {"method": "exact", "lr_factor": 0.25},
    "compact": {"method": "compact", "ratio": "1/16"},
}


def start(folder: Path, workers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pamm", "ablate", str(folder / "study.yaml")]
    return subprocess.Popen(
        [*command, "--output", str(folder / "studies"), "--workers", str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )


@pytest.mark.slow
def test_a_study_is_stopped_gone_on_with_by_several_workers_and_reported(tmp_path: Path) -> None:
    made = values(tmp_path, cells=CELLS, seeds=[0], keep_checkpoints=["compact"])
    made["base"] |= {"steps": 30, "save_every": 10, "eval_every": 10}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(made, sort_keys=False))
    folder = tmp_path / "studies/tiny"

    first, end = start(tmp_path, workers=1), time.monotonic() + 120
    while not list(folder.glob("runs/*/*/result.json")):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < end, "the study did not get going"
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)  # as timeout and cluster schedulers do
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 130, output
    assert "Traceback" not in output
    done = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*/result.json")}
    assert 1 <= len(done) < 9

    # Gone on with elsewhere: no more of it travels than the help of the command says.
    packed = tmp_path / "packed.tgz"
    left_out = ("checkpoint-*", "tensorboard", "tokens.bin")
    subprocess.run(
        ["tar", "-czf", packed, *(f"--exclude={name}" for name in left_out), "tiny"],
        cwd=folder.parent,
        check=True,
    )
    shutil.rmtree(folder)
    with tarfile.open(packed) as archive:
        archive.extractall(folder.parent, filter="data")
    assert not list(folder.rglob("tokens.bin"))
    second = start(tmp_path, workers=2)
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 0, output
    assert all(path.stat().st_mtime_ns // 10**9 == at // 10**9 for path, at in done.items())
    rows = {row["cell"]: row for row in read_json(folder / "results.json")}
    assert list(rows) == list(CELLS)
    assert len(list(folder.glob("runs/*/*/result.json"))) == 3 * 2 + 3
    kept = {path.parent.parent.name for path in folder.glob("runs/*/*/checkpoint-*")}
    assert kept == {"compact"}
    assert rows["exact, slow"]["lr_factor"] == 0.25
    assert rows["compact"]["held_bytes"] == rows["compact"]["predicted_bytes"]
    for cell in CELLS:
        assert cell in output

    # Whatever was interrupted is as if it had not been.
    for path in folder.glob("runs/*/lr-0.01_seed-0_steps-3"):
        config = PretrainConfig.load(path / "run.yaml")
        straight = tmp_path / "straight" / path.parent.name
        assert train_arm(
            config, config.arms[0], straight, Tokens.open(folder / "data"), quiet(), Stop()
        )
        assert lines(straight) == lines(path)
    slow, exact = (
        lines(next(folder.glob(f"runs/{name}/lr-*_seed-0"))) for name in ("exact-slow", "exact")
    )
    assert slow[0]["loss"] == pytest.approx(exact[0]["loss"])
    assert slow[-1]["eval_loss"] != exact[-1]["eval_loss"], "the reduced rate does something"

    page = CliRunner().invoke(app, ["report", str(folder), "--output", str(tmp_path / "docs")])
    assert page.exit_code == 0, page.output
    html = (tmp_path / "docs/results.html").read_text()
    markdown = (tmp_path / "docs/results.md").read_text()
    for cell in CELLS:
        assert cell in html
        assert f"| {cell} |" in markdown
    for name in ("tiny-loss", "tiny-rates"):
        assert f"({name}.png)" in markdown
        assert (tmp_path / f"docs/{name}.png").stat().st_size > 5000
    assert "http" not in html, "the page needs no other file"
    assert "Not finished" not in markdown
    assert "Choice of the rates" in markdown
    outcomes = {each.name: each for each in collect([folder]).outcomes}
    assert len(outcomes) == 3
    assert outcomes["compact"].tokens_per_second is None, "two workers took turns"

    next(folder.glob("runs/exact/lr-*_seed-0/result.json")).unlink()
    found = collect([folder])
    assert len(found.outcomes) == 2
    assert [progress.left for progress in found.studies.values()] == [1]
    page = CliRunner().invoke(app, ["report", str(folder), "--output", str(tmp_path / "docs")])
    assert "Not finished: 1 training" in (tmp_path / "docs/results.md").read_text()


def test_a_run_that_fails_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tries = study(tmp_path, lrs=[1e-2], seeds=[0]), []

    def fail(module: str, folder: Path, wanted: int | None) -> None:
        for run in made.to_do(folder):
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / FAILED).write_text("Traceback\nRuntimeError: out of memory\n")
            tries.append(run.cell)

    monkeypatch.setattr(module, "work", fail)
    for count in (1, 2):
        with pytest.raises(ArmFailedError, match=r"2 trainings failed.*: out of memory"):
            ablate(made, tmp_path / "studies", quiet())
        assert tries == ["exact", "pamm 1/16"] * count


def test_a_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PammError, match="without torchrun"):
        ablate(study(tmp_path), tmp_path / "studies", quiet())
    assert not (tmp_path / "studies").exists()


def test_runs_of_another_configuration_are_refused_and_more_cells_are_welcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "work", lambda *given: None)
    first = study(tmp_path, lrs=[1e-2])
    ablate(first, tmp_path / "studies", quiet())
    run = first.final(tmp_path / "studies/tiny", "exact")[0]
    run.folder.mkdir(parents=True)
    (run.folder / "run.yaml").write_text(run.config.to_yaml())

    more = study(
        tmp_path,
        lrs=[1e-2],
        cells=first.cells | {"other": {"method": "pamm", "ratio": "1/4"}},
        seeds=[0, 7],
    )
    ablate(more, tmp_path / "studies", quiet())
    changed = values(tmp_path)["base"] | {"weight_decay": 0.5}
    with pytest.raises(PammError, match="another configuration"):
        ablate(study(tmp_path, lrs=[1e-2], base=changed), tmp_path / "studies", quiet())
