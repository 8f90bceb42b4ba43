"""``pamm inspect`` and ``pamm plan``, from configurations of small models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PretrainedConfig,
    RwkvConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
)
from typer.testing import CliRunner, Result

import pamm
from pamm.analysis.inspect import inspect
from pamm.analysis.plan import RATIOS, Plan, largest, plan
from pamm.cli import app
from pamm.config import METHODS

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def save(folder: Path, kind: type[PretrainedConfig], architecture: str, **changes: Any) -> str:
    arguments = SMALL | {"architectures": [architecture]} | changes
    kind(**arguments).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return save(tmp_path, LlamaConfig, "LlamaForCausalLM", vocab_size=128)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


def test_groups_have_the_bytes_of_one_step(llama: str) -> None:
    found = inspect(llama, batch=2, seq=64, config=pamm.PammConfig("pamm", 1 / 16))
    x = 2 * 64 * 64 * 2
    assert [group.input_bytes for group in found.groups] == [x, x]
    assert found.groups[0].held_bytes == 8 * 64 * 2 + 128 * 3 + 4
    assert found.settings[0].exact - found.settings[0].converted == 2 * (
        x - found.groups[0].held_bytes
    )
    assert all(group.block_bytes * 2 < found.settings[0].exact for group in found.groups)


def test_without_a_method_it_is_what_convert_does(llama: str) -> None:
    found = inspect(llama, seq=64)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(llama)).bfloat16()
    report = pamm.convert(model)
    assert found.config == report.config == pamm.PammConfig()
    groups = [(group.name, group.held_bytes(64)) for group in report.converted]
    assert [(group.name, group.held_bytes) for group in found.groups] == groups
    x, roots, state = 64 * 64 * 2, 64 * 4, 8
    # Of the norm an fp32 copy of its input goes, the normalized one and 1 / the norm; X goes too.
    # The norm's own input is kept for that.
    freed = found.settings[0].exact - found.settings[0].converted
    assert freed == 2 * (2 * x + x + roots + x - x - state)


def test_what_cannot_be_made_again_is_left_to_other_methods(tmp_path: Path) -> None:
    folder = save(tmp_path, BertConfig, "BertModel")  # its embeddings end with dropout
    found = inspect(folder, seq=16)
    held = {group.name.split(".")[2]: group.held_bytes for group in found.groups}
    assert held == {"0": None, "1": 8}
    assert "subspace and pamm, which keep something of X, would convert 1 group more" in (
        found.verdict
    )
    kept = inspect(folder, seq=16, config=pamm.PammConfig("pamm"))
    assert not kept.skipped
    assert "would convert" not in kept.verdict


@pytest.mark.parametrize(
    ("method", "price"),
    [
        (
            "sampled",
            "approximate weight gradient of these layers. --method recompute frees no less",
        ),
        ("pamm", "approximate weight gradient of these layers. Where a norm makes X, --method rec"),
        ("recompute", "The gradient stays exact"),
        ("exact", "The gradient stays exact"),
    ],
)
def test_the_verdict_names_the_price_of_the_method(llama: str, method: str, price: str) -> None:
    verdict = inspect(llama, seq=64, config=pamm.PammConfig(method)).verdict
    assert price in verdict
    assert f"With bf16 weights, {method} frees" in verdict


def test_checkpointing_and_autocast_are_tried(llama: str) -> None:
    settings = inspect(llama, seq=64, config=pamm.PammConfig("pamm")).settings
    found = {each.name: each for each in settings}
    assert found["bf16 weights, activation checkpointing"].share == 0
    assert found["fp32 weights, bf16 autocast"].share > found["bf16 weights"].share > 0
    assert found["fp32 weights, bf16 autocast"].weight_copies > 0


def test_lora_with_fp32_adapters_has_the_most_to_free(llama: str) -> None:
    pytest.importorskip("peft")
    found = inspect(llama, seq=64, config=pamm.PammConfig("pamm"))
    lora = next(each for each in found.settings if "fp32 adapters" in each.name)
    assert lora.share == max(each.share for each in found.settings)
    assert f"The most would go with {lora.name}" in found.verdict


def test_a_group_that_frees_nothing_is_not_worth_it_and_says_who_keeps_x(llama: str) -> None:
    found = inspect(llama, seq=64)
    kept = [
        dataclasses.replace(group, others=(f"model.layers.{number}.mlp.fc1",))
        for number, group in enumerate(found.groups)
    ]
    exact = found.settings[0].exact
    nothing = dataclasses.replace(found.settings[0], converted=exact + 100)
    found = dataclasses.replace(found, groups=tuple(kept), settings=(nothing,))
    assert found.verdict.startswith(
        "Not worth it for memory. With bf16 weights, sampled frees nothing"
    )
    assert "X stays because of model.layers.{0..1}.mlp.fc1." in found.verdict


PHI = SMALL | {"vocab_size": 128, "architectures": ["PhiForCausalLM"]}


@pytest.fixture
def phi(tmp_path: Path) -> str:
    """Attention and MLP read one X: nothing is converted unless the group is widened."""
    PhiConfig(**PHI).save_pretrained(tmp_path)
    return str(tmp_path)


def test_what_is_not_converted_is_shown_with_the_reason_and_what_widen_brings(phi: str) -> None:
    found = inspect(phi, seq=64, config=pamm.PammConfig("pamm"))
    x = 64 * 64 * 2
    attention, wide = found.groups[:2], found.groups[2:]
    assert [(each.input_bytes, each.held_bytes) for each in attention] == [(x, None)] * 2
    assert attention[0].others == ("model.layers.0.mlp.fc1",)
    assert all(each.widened and not each.others and each.input_bytes == x for each in wide)
    assert [each.name for each in wide] == [
        f"model.layers.{n}.{{self_attn.{{q_proj,k_proj,v_proj}},mlp.fc1}}" for n in range(2)
    ]
    now = found.settings[0]
    assert now.exact == now.converted
    assert now.widened is not None
    assert wide[0].held_bytes is not None
    assert now.exact - now.widened == 2 * (x - wide[0].held_bytes)
    assert {group.reason.rpartition(";")[2] for group in found.skipped} == {
        " convert them all with widen=True"
    }


def test_with_widen_those_are_the_groups(phi: str) -> None:
    found, wide = inspect(phi, seq=64), inspect(phi, seq=64, widen=True)
    assert [group.name for group in wide.groups] == [group.name for group in found.groups[2:]]
    assert wide.settings[0].converted == found.settings[0].widened
    assert not wide.skipped


def test_lora_frees_what_an_mlp_without_adapters_does_not_keep(phi: str) -> None:
    pytest.importorskip("peft")
    lora = next(each for each in inspect(phi, seq=64).settings if "bf16 adapters" in each.name)
    assert lora.share > 0
    assert lora.widened is None


def test_layers_of_another_class_are_shown_too(tmp_path: Path) -> None:
    settings = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    FalconConfig(**settings, architectures=["FalconForCausalLM"]).save_pretrained(tmp_path)
    found = inspect(str(tmp_path), seq=16)
    (group,) = found.groups
    assert (group.held_bytes, group.input_bytes) == (None, 16 * 64 * 2)
    assert "FalconLinear, not nn.Linear" in found.skipped[0].reason
    assert found.verdict.startswith(
        "Not worth it for memory. With bf16 weights, sampled frees nothing"
    )


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    RwkvConfig(hidden_size=32, num_hidden_layers=1, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(pamm.NothingToConvertError, match="no attention projections named"):
        inspect(str(tmp_path))


def test_the_commands_take_targets_and_widen(phi: str) -> None:
    options = ("--seq", "64", "--target", "attention", "--target", "mlp", "--widen")
    for command in ("inspect", "plan"):
        result = call(command, phi, *options)
        assert result.exit_code == 0, result.output
        assert "stays" not in result.stdout
    plain = " ".join(call("plan", phi, "--seq", "64").stdout.split())
    assert "sampled frees nothing in this step." in plain
    assert "mlp.fc1; convert them all with widen=True." in plain


def test_an_encoder_with_a_decoder(tmp_path: Path) -> None:
    config = T5Config(
        d_model=32, d_ff=64, d_kv=16, num_heads=2, num_layers=2, vocab_size=64,
        architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    found = {group.name: group for group in inspect(str(tmp_path), seq=16).groups}
    both = found["decoder.block.{0..1}.layer.1.EncDecAttention.{k,v}"]
    assert both.block_bytes == 0
    assert both.input_bytes == 16 * 32 * 2


def test_a_configuration_that_makes_no_model_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, BertConfig, "BertModel", hidden_size=63)
    with pytest.raises(pamm.PammError, match="cannot build a model from the configuration"):
        inspect(folder)


@pytest.mark.parametrize(
    ("kind", "architecture", "changes"),
    [
        (BertConfig, "BertForSequenceClassification", {}),
        (BertConfig, "BertModel", {}),
        (ViTConfig, "ViTForImageClassification", {"image_size": 32, "patch_size": 8}),
    ],
)
def test_encoders_and_image_models(
    tmp_path: Path, kind: type[PretrainedConfig], architecture: str, changes: dict[str, Any]
) -> None:
    found = inspect(save(tmp_path, kind, architecture, **changes), batch=2, seq=32)
    assert found.model == architecture
    assert all(group.input_bytes > 0 and not group.others for group in found.groups)


def test_a_configuration_file_without_architectures_will_do(tmp_path: Path) -> None:
    folder = save(tmp_path, LlamaConfig, "LlamaForCausalLM", architectures=None)
    assert inspect(f"{folder}/config.json", seq=16).model == "LlamaForCausalLM"


def test_the_command_prints_groups_settings_and_a_verdict(llama: str) -> None:
    result = call("inspect", llama, "--seq", "64", "--method", "pamm", "--ratio", "1/16")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    for part in ("self_attn", "pamm with ratio 1/16", "activation checkpointing", "pamm frees"):
        assert part in text
    assert "norm that makes X again" not in text


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_the_commands_know_directions(llama: str, command: str) -> None:
    result = call(command, llama, "--seq", "64", "--method", "sampled", "--directions", "8")
    assert "sampled with ratio 2/3 and up to 8 directions" in " ".join(result.stdout.split())
    result = call(command, llama, "--directions", "8")
    assert result.exit_code == 2
    assert "directions is 8, but what it means depends on the method" in result.stderr


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_the_commands_begin_with_the_default_and_know_all_methods(llama: str, command: str) -> None:
    plain = " ".join(call(command, llama, "--seq", "64").stdout.split())
    assert "sampled with ratio 2/3" in plain
    shown = " ".join(call(command, "--help").stdout.split())
    assert "default, sampled 2/3, if left out" in shown
    for method in METHODS:
        assert f" {method}" in shown
    exact = call(command, llama, "--seq", "64", "--method", "recompute")
    assert exact.exit_code == 0, exact.output
    assert "recompute" in exact.stdout
    assert "recompute with ratio" not in exact.stdout


def made(llama: str, **arguments: Any) -> Plan:
    return plan(llama, batch=2, seq=64, **arguments)


def test_plan_adds_up(llama: str) -> None:
    found = made(llama)
    parameters = sum((128 * 64, 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64), 64, 128 * 64))
    assert 2 * parameters <= found.exact.weights < 2.1 * parameters
    assert found.exact.optimizer == 4 * parameters
    assert found.exact.peak > found.exact.weights + found.exact.optimizer + found.exact.saved
    freed = found.exact.saved - found.converted.saved
    assert found.exact.peak - found.converted.peak == freed > 0


@pytest.mark.parametrize("config", [pamm.PammConfig(), pamm.PammConfig("pamm")])
def test_the_largest_batch_fits_and_the_next_does_not(llama: str, config: pamm.PammConfig) -> None:
    found = made(llama, memory="8MB", config=config)
    room = 0.95 * 8 * 2**20
    for number, field in ((found.batch_exact, "exact"), (found.batch_converted, "converted")):
        assert number > 1
        plans = [plan(llama, batch=number + more, seq=64, config=config) for more in (0, 1)]
        at, above = (getattr(each, field).peak for each in plans)
        assert at <= room < above
    assert found.batch_converted >= found.batch_exact


@given(
    lines=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**10)), min_size=1),
    slope=st.integers(1, 10**8),
    room=st.integers(0, 10**12),
)
def test_the_largest_number_is_found_behind_every_bend(
    lines: list[tuple[int, int]], slope: int, room: int
) -> None:
    """A peak is the highest of several lines; the last one makes it end somewhere."""
    tried: dict[int, int] = {}

    def size(number: int) -> int:
        tried[number] = max(a * number + b for a, b in [*lines, (slope, 0)])
        return tried[number]

    found = largest(size, room)
    assert found == 0 or size(found) <= room
    assert size(found + 1) > room
    assert len(tried) < 150


def test_along_a_line_few_numbers_are_tried() -> None:
    tried: set[int] = set()

    def size(number: int) -> int:
        tried.add(number)
        return 7 + 3 * number

    assert largest(size, 3008.5) == 1000
    assert len(tried) < 8


def test_nothing_fits(llama: str) -> None:
    found = made(llama, memory="100KB")
    assert (found.batch_exact, found.batch_converted) == (0, 0)
    assert "Not even one sequence fits" in found.advice


def test_under_checkpointing_nothing_is_freed(llama: str) -> None:
    found = made(llama, checkpointing=True)
    assert found.exact.saved == found.converted.saved < made(llama).converted.saved
    assert "frees nothing" in found.advice


def test_the_plan_command_prints_a_table_and_advice(llama: str) -> None:
    result = call("plan", llama, "--batch", "2", "--seq", "64", "--memory", "8MB")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    for part in ("kept for backward", "peak of the step", "largest batch", "sampled lowers the"):
        assert part in text
    assert "Choose ratio" not in text
    assert "same memory with any ratio" in text
    pamms = call("plan", llama, "--seq", "64", "--memory", "8MB", "--method", "pamm").stdout
    assert "Choose ratio" in pamms
    assert "any ratio" not in pamms


def test_a_ratio_is_chosen_for_pamm_alone(llama: str) -> None:
    chosen = {
        method: made(llama, memory="8MB", config=pamm.PammConfig(method)).ratio
        for method in ("pamm", "sampled", "recompute", "subspace")
    }
    assert chosen["pamm"] in RATIOS
    assert {ratio for method, ratio in chosen.items() if method != "pamm"} == {None}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--dtype", "fp8"], "bf16, bf16-amp, fp16-amp, fp32"),
        (["--batch", "0"], "batch is 0"),
        (["--seq", "-1"], "seq is -1"),
        (["--seq", "99999999999"], "batch x seq is 99,999,999,999 tokens; give no more than"),
        (["--method", "pamm", "--ratio", "2"], "ratio is '2'"),
        (["--ratio", "1/8"], "what it means depends on the method"),
        (["--method", "papa"], "choose one of pamm, subspace,"),
        (["--memory", "24"], "give a number with a unit"),
    ],
)
def test_bad_arguments_are_refused(llama: str, arguments: list[str], part: str) -> None:
    result = call("plan", llama, *arguments)
    assert result.exit_code == 2
    assert part in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    result = call("inspect", str(tmp_path))
    assert result.exit_code == 2
    assert "cannot read a model's configuration" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_size": "a"}, "'hidden_size'"),
        ({"hidden_size": 65, "num_attention_heads": 4}, "not a multiple"),
    ],
)
def test_values_that_make_no_model_are_refused(
    tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"} | changes))
    result = call("inspect", str(path))
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert "is not one of a model" in message
    assert part in message


def test_models_that_take_sound_are_refused_by_name(tmp_path: Path) -> None:
    WhisperConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        architectures=["WhisperForConditionalGeneration"],
    ).save_pretrained(tmp_path)
    with pytest.raises(pamm.PammError, match="takes 'input_features'"):
        inspect(str(tmp_path))
