"""What ``plan`` predicts, against the peaks that committed runs on a GPU measured."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pamm.analysis.plan import plan
from pamm.bench.arms import arm_config

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def runs(file: str, *arms: str) -> list[dict[str, Any]]:
    """Of whole steps in eager mode."""
    lines = (RESULTS / file).read_text().splitlines()
    return [
        run
        for run in map(json.loads, lines)
        if run["benchmark"] == "model" and not run["compiled"] and run["arm"] in arms
    ]


RUNS = [
    *runs("h100/steps.jsonl", "exact", "pamm"),
    *runs("h200/speed.jsonl", "recompute", "sampled:1/2:16bit", "sampled:1/4:16bit"),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['model']}-{run['arm']}")
def test_a_peak_on_a_gpu_is_predicted(run: dict[str, Any], tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=run["hidden"],
        intermediate_size=run["ffn"],
        num_attention_heads=run["heads"],
        num_hidden_layers=run["layers"],
        vocab_size=32_000,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    config = arm_config(run["arm"])
    if config.method == "pamm":
        assert config.generators(run["tokens"]) == run["k"]
    found = plan(str(tmp_path), batch=run["batch"], seq=run["sequence"], config=config)
    predicted = found.exact if run["arm"] == "exact" else found.converted
    assert predicted.peak == pytest.approx(run["peak_allocated_bytes"], rel=0.01)


def test_there_are_such_runs() -> None:
    arms = {"exact", "pamm", "recompute", "sampled:1/2:16bit", "sampled:1/4:16bit"}
    assert {run["arm"] for run in RUNS} == arms
