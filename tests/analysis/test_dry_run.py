"""What a step without weights predicts, against what a real step on the CPU keeps."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import pamm
from pamm.analysis.dry_run import Compressed, DryRun, dry_run
from pamm.analysis.memory import group_layers
from pamm.compressors import compressor
from pamm.report import Report
from tests.helpers import Model, saved_bytes, saved_tensors

TOKENS, BATCH = 64, 4
MODES = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=256,
            use_cache=False,
        )
    )


def bert() -> PreTrainedModel:
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=256,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def loss_of(model: PreTrainedModel) -> Callable[[], Tensor]:
    ids = torch.randint(256, (BATCH, TOKENS))
    labels = ids if isinstance(model, LlamaForCausalLM) else torch.zeros(BATCH, dtype=torch.long)
    return lambda: model(input_ids=ids, labels=labels).loss


def measured(model: PreTrainedModel, autocast: torch.dtype | None) -> int:
    context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    loss = loss_of(model)
    with context, saved_tensors() as saved:
        loss()
    return saved_bytes(saved, [*model.parameters(), *model.buffers()])


def predicted(
    make: Callable[[], PreTrainedModel], mode: str, groups: list[Compressed] | None = None
) -> DryRun:
    dtype, autocast = MODES[mode]
    with torch.device("meta"):
        model = make().to(dtype).train()
    return dry_run(model, loss_of(model), autocast, groups or [])


def states(report: Report, model: nn.Module, dtype: torch.dtype) -> list[Compressed]:
    layers = group_layers(model)
    groups = []
    for group in report.converted:
        sizes = compressor(group.config)

        def held(rows: int, n: int = group.in_features, sizes: object = sizes) -> int:
            return sizes.state_bytes(rows, n, dtype)  # type: ignore[attr-defined]

        groups.append(Compressed(frozenset(layers[group.name]), held))
    return groups


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [llama, bert])
def test_kept_bytes_are_those_of_a_real_step(
    make: Callable[[], PreTrainedModel], mode: str
) -> None:
    dtype, autocast = MODES[mode]
    real = measured(make().to(dtype).train(), autocast)
    assert predicted(make, mode).saved == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [llama, bert])
def test_a_converted_model_keeps_what_is_predicted(
    make: Callable[[], PreTrainedModel], mode: str
) -> None:
    dtype, autocast = MODES[mode]
    model = make().to(dtype).train()
    report = pamm.convert(model, pamm.PammConfig("pamm", 1 / 32))
    real = measured(model, autocast)
    groups = states(report, model, autocast or dtype)
    found = predicted(make, mode, groups)
    assert found.saved == pytest.approx(real, rel=0.01)
    assert found.saved < predicted(make, mode).saved
    assert found.peak < predicted(make, mode).peak


def test_x_of_a_group_is_freed_once_and_all_copies_of_it_under_autocast() -> None:
    layers = {f"model.layers.0.self_attn.{name}_proj" for name in "qkv"}
    x = BATCH * TOKENS * 128
    assert predicted(llama, "bf16").freed(layers) == 2 * x
    assert predicted(llama, "autocast").freed(layers) == 3 * 2 * x
    assert predicted(llama, "bf16").freed(layers - {"model.layers.0.self_attn.v_proj"}) == 0


def test_others_that_keep_the_input_are_named() -> None:
    run = predicted(llama, "bf16")
    alone = {"model.layers.1.self_attn.q_proj"}
    assert {name.rpartition(".")[2] for name in run.others(alone)} == {"k_proj", "v_proj"}
    assert not run.others({f"model.layers.1.self_attn.{name}_proj" for name in "qkv"})


def test_a_parallel_block_frees_nothing_and_names_the_other_reader() -> None:
    config = PhiConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        use_cache=False,
        resid_pdrop=0.0,
    )
    with torch.device("meta"):
        model = PhiForCausalLM(config).bfloat16().train()
    ids = torch.randint(64, (2, 8))
    run = dry_run(model, lambda: model(input_ids=ids, labels=ids).loss)
    layers = {f"model.layers.0.self_attn.{name}_proj" for name in "qkv"}
    assert run.freed(layers) == 0
    assert run.others(layers) == {"model.layers.0.mlp.fc1"}
    assert run.freed(layers | {"model.layers.0.mlp.fc1"}) == 2 * 8 * 64 * 2


def test_the_peak_is_that_of_a_chain_worked_out_by_hand() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).to("meta")
    x = torch.empty(100, 8, device="meta")
    run = dry_run(model, lambda: model(x).sum())
    activation, weight = 100 * 8 * 4, 8 * 8 * 4
    # x and two outputs are kept. In the backward of the last layer: its weight's gradient, the
    # expanded gradient of the sum (one number, and the loss another), and the input's gradient.
    assert run.saved == 3 * activation
    assert activation * 4 < run.peak <= activation * 5 + 3 * weight + 8


def test_the_model_is_left_as_it_was() -> None:
    model = Model().to("meta")
    state = torch.get_rng_state()
    dry_run(model, lambda: model(torch.empty(2, 4, 16, device="meta")).sum())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("p", "bytes_per_element"), [(0.0, 0), (0.5, 1)])
def test_a_dropout_mask_takes_a_byte_as_on_cuda(p: float, bytes_per_element: int) -> None:
    model = nn.Dropout(p)
    x = torch.empty(10, 10, device="meta", requires_grad=True)
    assert dry_run(model, lambda: model(x).sum()).saved == 100 * bytes_per_element


def test_experts_in_fp32() -> None:
    """Their grouped product is known on ``meta`` for bf16 alone."""
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, use_cache=False, experts_implementation="grouped_mm",
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).train()
    ids = torch.zeros(2, 8, dtype=torch.long)
    run = dry_run(model, lambda: model(input_ids=ids, labels=ids).loss)
    assert run.saved > 0
    assert run.peak > run.saved
