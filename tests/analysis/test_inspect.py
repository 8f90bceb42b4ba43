"""``pamm inspect`` and ``pamm plan``, from configurations of small models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    FalconConfig,
    LlamaConfig,
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
from pamm.analysis.plan import Plan, plan
from pamm.cli import app

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
    assert found.settings[0].exact - found.settings[0].pamm == 2 * (x - found.groups[0].held_bytes)
    assert all(group.block_bytes * 2 < found.settings[0].exact for group in found.groups)


def test_checkpointing_and_autocast_are_tried(llama: str) -> None:
    found = {each.name: each for each in inspect(llama, seq=64).settings}
    assert found["bf16 weights, activation checkpointing"].share == 0
    assert found["fp32 weights, bf16 autocast"].share > found["bf16 weights"].share > 0
    assert found["fp32 weights, bf16 autocast"].weight_copies > 0


def test_lora_with_fp32_adapters_has_the_most_to_free(llama: str) -> None:
    pytest.importorskip("peft")
    found = inspect(llama, seq=64)
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
    nothing = dataclasses.replace(found.settings[0], pamm=exact + 100)
    found = dataclasses.replace(found, groups=tuple(kept), settings=(nothing,))
    assert found.verdict.startswith(
        "Not worth it for memory. With bf16 weights, PAMM frees nothing"
    )
    assert "X stays because of model.layers.{0..1}.mlp.fc1." in found.verdict


PHI = SMALL | {"vocab_size": 128, "architectures": ["PhiForCausalLM"]}


@pytest.fixture
def phi(tmp_path: Path) -> str:
    """Attention and MLP read one X: nothing is converted unless the group is widened."""
    PhiConfig(**PHI).save_pretrained(tmp_path)
    return str(tmp_path)


def test_what_is_not_converted_is_shown_with_the_reason_and_what_widen_brings(phi: str) -> None:
    found = inspect(phi, seq=64)
    x = 64 * 64 * 2
    attention, wide = found.groups[:2], found.groups[2:]
    assert [(each.input_bytes, each.held_bytes) for each in attention] == [(x, None)] * 2
    assert attention[0].others == ("model.layers.0.mlp.fc1",)
    assert all(each.widened and not each.others and each.input_bytes == x for each in wide)
    assert [each.name for each in wide] == [
        f"model.layers.{n}.{{self_attn.{{q_proj,k_proj,v_proj}},mlp.fc1}}" for n in range(2)
    ]
    now = found.settings[0]
    assert now.exact == now.pamm
    assert now.widened is not None
    assert wide[0].held_bytes is not None
    assert now.exact - now.widened == 2 * (x - wide[0].held_bytes)
    assert {group.reason.rpartition(";")[2] for group in found.skipped} == {
        " convert them all with widen=True"
    }


def test_with_widen_those_are_the_groups(phi: str) -> None:
    found, wide = inspect(phi, seq=64), inspect(phi, seq=64, widen=True)
    assert [group.name for group in wide.groups] == [group.name for group in found.groups[2:]]
    assert wide.settings[0].pamm == found.settings[0].widened
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
        "Not worth it for memory. With bf16 weights, PAMM frees nothing"
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
    assert "PAMM frees nothing in this step." in plain
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
    result = call("inspect", llama, "--seq", "64", "--ratio", "1/16")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    for part in ("self_attn", "ratio 1/16", "activation checkpointing", "PAMM frees"):
        assert part in text


def made(llama: str, **arguments: Any) -> Plan:
    return plan(llama, batch=2, seq=64, **arguments)


def test_plan_adds_up(llama: str) -> None:
    found = made(llama)
    parameters = sum((128 * 64, 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64), 64, 128 * 64))
    assert 2 * parameters <= found.exact.weights < 2.1 * parameters
    assert found.exact.optimizer == 4 * parameters
    assert found.exact.peak > found.exact.weights + found.exact.optimizer + found.exact.saved
    freed = found.exact.saved - found.pamm.saved
    assert found.exact.peak - found.pamm.peak == freed > 0


def test_the_largest_batch_fits_and_the_next_does_not(llama: str) -> None:
    found = made(llama, memory="8MB")
    room = 0.95 * 8 * 2**20
    for number, config in ((found.batch_exact, None), (found.batch_pamm, found.config)):
        assert number > 1
        peaks = [plan(llama, batch=number + more, seq=64) for more in (0, 1)]
        at, above = (each.exact.peak if config is None else each.pamm.peak for each in peaks)
        assert at <= room < above
    assert found.batch_pamm >= found.batch_exact


def test_nothing_fits(llama: str) -> None:
    found = made(llama, memory="100KB")
    assert (found.batch_exact, found.batch_pamm) == (0, 0)
    assert "Not even one sequence fits" in found.advice


def test_under_checkpointing_nothing_is_freed(llama: str) -> None:
    found = made(llama, checkpointing=True)
    assert found.exact.saved == found.pamm.saved < made(llama).pamm.saved
    assert "frees nothing" in found.advice


def test_the_plan_command_prints_a_table_and_advice(llama: str) -> None:
    result = call("plan", llama, "--batch", "2", "--seq", "64", "--memory", "8MB")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    for part in ("kept for backward", "peak of the step", "largest batch", "Choose ratio"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--dtype", "fp8"], "bf16, bf16-amp, fp16-amp, fp32"),
        (["--batch", "0"], "batch is 0"),
        (["--seq", "-1"], "seq is -1"),
        (["--ratio", "2"], "ratio is '2'"),
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
