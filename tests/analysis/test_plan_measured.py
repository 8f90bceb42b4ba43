"""What ``plan`` predicts, against the peaks that committed runs on a GPU measured."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import pamm
from pamm.analysis.plan import plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h100" / "steps.jsonl"
RUNS = [
    run
    for run in map(json.loads, RESULTS.read_text().splitlines())
    if run["benchmark"] == "model" and not run["compiled"] and run["arm"] in ("exact", "pamm")
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['model']}-{run['arm']}")
def test_a_peak_on_an_h100_is_predicted(run: dict[str, Any], tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=run["hidden"],
        intermediate_size=run["ffn"],
        num_attention_heads=run["heads"],
        num_hidden_layers=run["layers"],
        vocab_size=32_000,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    config = pamm.PammConfig("pamm", run["k"] / run["tokens"])
    found = plan(str(tmp_path), batch=run["batch"], seq=run["sequence"], config=config)
    predicted = found.exact if run["arm"] == "exact" else found.pamm
    assert predicted.peak == pytest.approx(run["peak_allocated_bytes"], rel=0.01)


def test_there_are_such_runs() -> None:
    assert {run["arm"] for run in RUNS} == {"exact", "pamm"}
