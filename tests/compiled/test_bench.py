"""Benchmarks of compiled steps: every arm is compiled, however many there are; the bare loop."""

import runpy
from pathlib import Path

import pytest
import torch

import pamm
from pamm.bench.model import bench_model
from pamm.surgery import is_converted

pytestmark = pytest.mark.filterwarnings("default")


def test_every_arm_is_compiled() -> None:
    """The compiler's limit, here one, would leave all but the first uncompiled."""
    names = ("exact", "pamm", "uniform_crs:1/8")
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        records = bench_model(
            "tiny", pamm.PammConfig("pamm"), torch.device("cpu"), names, repeats=1, compiled=True
        )
        assert torch._dynamo.config.recompile_limit == 1
    assert [record["arm"] for record in records] == list(names)


def test_the_bare_loop_changes_the_method_on_its_way(tmp_path: Path) -> None:
    """``recompute`` is exact: from half of the steps on, or never, the losses are the same."""
    pytest.importorskip("transformers")
    quality = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/quality.py"))
    for name, sequences in (("train", 40), ("validation", 16)):
        tokens = torch.arange(sequences * 257) % 97
        torch.save(tokens.to(torch.int16), tmp_path / f"{name}.pt")
    data = quality["Data"](tmp_path)
    run = {"arm": "exact", "lr": 1e-3, "steps": 8, "size": "tiny", "batch": 2}
    then = {"at": 0.5, "config": {"method": "recompute"}}
    plain, _ = quality["train"](run, data)
    changed, model = quality["train"](run | {"then": then}, data)
    assert changed["training_loss"] == pytest.approx(plain["training_loss"], rel=1e-4)
    assert is_converted(model)
    assert len(changed["step_ms_tenths"]) == 8
