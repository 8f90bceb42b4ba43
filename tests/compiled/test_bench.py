"""Benchmarks of compiled steps: every arm is compiled, however many there are."""

import pytest
import torch

import pamm
from pamm.bench.model import bench_model

pytestmark = pytest.mark.filterwarnings("default")


def test_every_arm_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's limit, here one, would leave all but the first uncompiled."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    names = ("exact", "pamm", "uniform_crs:1/8")
    records = bench_model(
        "tiny", pamm.PammConfig(), torch.device("cpu"), names, repeats=1, compiled=True
    )
    assert [record["arm"] for record in records] == list(names)
    assert torch._dynamo.config.recompile_limit == 1
