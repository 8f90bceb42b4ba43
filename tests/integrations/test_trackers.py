"""The mixin's numbers reach W&B and Trackio, where these are installed."""

import sqlite3
from pathlib import Path

import pytest

from tests.integrations.test_trainer_mixin import trainer

LAYER = "model.layers.1.self_attn.v_proj"
KEYS = {"train/pamm_held_bytes", f"train/pamm_cosine/{LAYER}", f"train/pamm_relative_error/{LAYER}"}
SETTINGS = {"pamm_log_steps": 2, "pamm_log_layers": [LAYER]}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the trackers themselves


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trainer(tmp_path, arguments={"report_to": "wandb"}, **SETTINGS).train()
    seen = dict(wandb.run.summary)
    wandb.finish()
    assert seen.keys() >= KEYS
    assert 0 < seen[f"train/pamm_cosine/{LAYER}"] < 1


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="Trackio is not installed")
    arguments = {"report_to": "trackio", "project": "pamm", "trackio_space_id": None}
    trainer(tmp_path, arguments=arguments, **SETTINGS).train()
    (database,) = (tmp_path / "trackio").glob("pamm*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT metrics FROM metrics").fetchall()
    written = " ".join(str(row) for row in rows)
    assert all(key in written for key in KEYS)
