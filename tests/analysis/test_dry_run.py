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
from pamm.analysis.inspect import compressed, find
from pamm.analysis.meta_model import Precision
from pamm.integrations.lora import add_lora
from tests.helpers import Model, saved_bytes, saved_tensors

TOKENS, BATCH = 64, 4
MODES = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "autocast": (torch.float32, torch.bfloat16),
}


CONFIGS = (
    pamm.PammConfig("pamm", 1 / 32),
    pamm.PammConfig("subspace"),
    pamm.PammConfig("sampled", directions=16),
    pamm.PammConfig("recompute"),
)


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [llama, bert])
def test_kept_bytes_are_those_of_a_real_step(
    make: Callable[[], PreTrainedModel], mode: str
) -> None:
    dtype, autocast = MODES[mode]
    real = measured(make().to(dtype).train(), autocast)
    assert predicted(make, mode).saved == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [llama, bert])
def test_a_converted_model_keeps_what_is_predicted(
    make: Callable[[], PreTrainedModel], mode: str, config: pamm.PammConfig
) -> None:
    dtype, autocast = MODES[mode]
    model = make().to(dtype).train()
    groups = compressed(find(model, config, "attention"), Precision(dtype, autocast))
    pamm.convert(model, config)
    real = measured(model, autocast)
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


def normed(is_trained: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A norm whose output two layers read, and the loss of 100 tokens."""
    layers = {"norm": nn.LayerNorm(8), "a": nn.Linear(8, 1), "b": nn.Linear(8, 1)}
    model = nn.ModuleDict(layers).to("meta")
    model["norm"].requires_grad_(is_trained)
    h = torch.empty(100, 8, device="meta", requires_grad=is_trained)

    def loss() -> Tensor:
        x = model["norm"](h)
        return model["a"](x).sum() + model["b"](x).sum()

    return model, loss


def grouped(source: str | None) -> list[Compressed]:
    return [Compressed(frozenset("ab"), lambda rows: 16, source)]


def test_an_input_made_again_is_there_in_backward_alone() -> None:
    model, loss = normed(is_trained=True)
    x, statistics = 100 * 8 * 4, 2 * 100 * 4
    exact = dry_run(model, loss)
    again, gone = (dry_run(model, loss, compressed=grouped(source)) for source in ("norm", None))
    assert exact.saved == x + statistics + x
    assert again.saved == x + 16
    assert gone.saved == x + statistics + 16
    # While gradients of X from both layers are added up: X, and the statistics come with it.
    assert again.peak == gone.peak + x


def test_an_input_without_a_gradient_is_kept() -> None:
    """As by a conversion: no backward of the norm says when to make it again."""
    model, loss = normed(is_trained=False)
    assert dry_run(model, loss, compressed=grouped("norm")).saved == 100 * 8 * 4 + 16


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.method)
def test_adapters_in_fp32_keep_what_is_predicted(config: pamm.PammConfig) -> None:
    """X of the first block, below which all is frozen, stays: once, and not in three copies."""
    pytest.importorskip("peft")
    names = [f"model.layers.{n}.self_attn.{name}_proj" for n in range(2) for name in "qkv"]
    with torch.device("meta"):
        meta = llama().bfloat16().train()
    model = llama().bfloat16().train()
    for each in (meta, model):
        add_lora(each, names, True)
    groups = compressed(find(meta, config, "attention"), Precision(torch.bfloat16))
    pamm.convert(model, config)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    found = dry_run(meta, lambda: meta(input_ids=ids, labels=ids).loss, compressed=groups)
    assert found.saved == pytest.approx(measured(model, None), rel=0.003)


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
