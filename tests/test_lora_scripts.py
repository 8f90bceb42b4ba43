"""The example and the benchmark of LoRA run to their end on a tiny model."""

import json
from pathlib import Path

import pytest

from tests.helpers import run_script

pytest.importorskip("peft")


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_example(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    options = ("--tiny", "--steps", "2", "--tokens", "128", "--dtype", "bfloat16")
    options += ("--results", str(results))
    for arm in ("lora", "lora_pamm", "qlora_pamm"):
        out = run_script("examples/lora_smollm2.py", *options, "--arm", arm)
        assert f"{arm} " in out
    exact, ours, four_bit = records(results)
    assert four_bit["kept_by_lora_A_bytes"] == ours["kept_by_lora_A_bytes"]
    assert four_bit["eval_loss_before"] != ours["eval_loss_before"]
    assert exact["eval_loss_before"] == ours["eval_loss_before"]  # the output is the same
    assert exact["train_losses"][0] == ours["train_losses"][0]  # type: ignore[index]
    x = 2 * 128 * 32  # blocks, tokens, features
    assert exact["kept_by_lora_A_bytes"] == 3 * 4 * x
    state = 2 * (4 * 32 * 2 + 128 * 3 + 4)
    assert ours["kept_by_lora_A_bytes"] == state
    assert exact["kept_bytes"] - ours["kept_bytes"] == 3 * 4 * x - state  # type: ignore[operator]


def test_memory_of_fine_tunings(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    run_script("benchmarks/finetune_memory.py", "roberta", str(results), "--tiny")
    run_script("benchmarks/finetune_memory.py", "pixtral", str(results), "--tiny", "--repeats", "1")
    lines = records(results)
    exact, ours = lines[:2]
    assert exact["held_bytes"] == exact["paper_bytes"] == 2 * 16 * 64 * 64 * 4
    assert ours["paper_bytes"] == 2 * 3 * 8 * 64 * 4  # k = 8, three sets of generators
    one, eight = lines[4::2], lines[5::2]
    assert {line["batch"] for line in one} == {1}
    assert [line["arm"] for line in one] == [line["arm"] for line in eight]
    for line, images in ((one[0], 1), (eight[0], 8)):
        assert line["vision_held_bytes"] == 2 * images * 16 * 32 * 3 * 4  # three copies in fp32
        assert line["language_held_bytes"] == 2 * images * 32 * 64 * 3 * 4
    assert [line["vision_generators"] for line in eight] == [None, None, 1, 1]
    assert [line["language_generators"] for line in eight] == [None, None, 2, 1]
    for bf16, pamm in ((one[1], one[2]), (eight[1], eight[3])):
        for tower in ("vision", "language"):
            held = f"{tower}_held_bytes"
            assert pamm[held] < bf16[held] / 4  # type: ignore[operator]
            assert bf16[held] == one[0][held] / 6 * bf16["batch"]  # type: ignore[operator]


def test_benchmark(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    run_script("benchmarks/lora.py", str(results), "--tiny", "--repeats", "1")
    arms = [record["arm"] for record in records(results)]
    assert len(arms) == 2 * len(set(arms)) == 16
    for record in records(results):
        if "recompute" in str(record["arm"]):
            assert record["adapter_inputs_held_bytes"] == 0
