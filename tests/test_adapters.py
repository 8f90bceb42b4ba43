"""LoRA by PEFT: what is converted, what stays bit for bit, what is held."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pamm
from pamm.adapters import PammAdapter
from pamm.analysis.memory import saved_bytes
from pamm.fidelity import watch
from pamm.nn import groups
from pamm.recompute import Recomputed, group_layers
from pamm.surgery import is_converted
from tests.helpers import NAMES, counted_compressions, exact_config, pamm_layers

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# PEFT asks Transformers whether it checkpoints under the name of version 4.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

WIDTH, BLOCKS, TOKENS = 64, 2, 64
CONFIG = pamm.PammConfig("pamm", 1 / 8)
BLOCK = "base_model.model.model.layers.0.self_attn"


def llama(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def lora_config(**settings: Any) -> Any:
    """Adapters that change the output from the start, so that both matrices get a gradient."""
    return peft.LoraConfig(
        **{"r": 4, "target_modules": list(NAMES), "init_lora_weights": False, **settings}
    )


def lora(adapter_fp32: bool = True, base: nn.Module | None = None, **settings: Any) -> Any:
    """A small LLaMA with adapters; the same one at each call."""
    base = base or llama()
    torch.manual_seed(1)
    config = lora_config(**settings)
    return peft.get_peft_model(base, config, autocast_adapter_dtype=adapter_fp32).train()


def ids(seed: int = 2) -> Tensor:
    return torch.randint(64, (2, TOKENS // 2), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of one training step; the same dropout each time."""
    torch.manual_seed(3)
    model.zero_grad()
    output = model(input_ids=ids(), labels=ids())
    output.loss.backward()
    return output.logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_as_peft(converted: nn.Module, plain: nn.Module, approximate: str = "lora_A") -> None:
    """Bit for bit, but for the gradient of converted weights."""
    (logits, gradients), (expected, all_expected) = step(converted), step(plain)
    assert torch.equal(logits, expected)
    assert gradients.keys() == all_expected.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == all_expected[name].dtype
        if approximate not in name:
            assert torch.equal(gradient, all_expected[name]), name


SETTINGS = {
    "fp32": {},
    "bf16": {"adapter_fp32": False},
    "fp32, dropout": {"lora_dropout": 0.05},
    "bf16, dropout": {"adapter_fp32": False, "lora_dropout": 0.05},
    "DoRA": {"use_dora": True},
    "DoRA, dropout": {"use_dora": True, "lora_dropout": 0.05},
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "rank-stabilised": {"use_rslora": True},
}


@pytest.mark.parametrize(
    "config",
    [pamm.PammConfig(method, 1 / 2) for method in ("subspace", "uniform_crs", "compact")]
    + [pamm.PammConfig("exact")],
    ids=lambda config: config.method,
)
def test_other_methods_take_adapters_in_fp32_on_a_base_in_bf16(config: pamm.PammConfig) -> None:
    model = lora()
    pamm.convert(model, config)
    assert_as_peft(model, lora())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
class TestTraining:
    def test_all_but_the_gradient_of_lora_A_is_as_in_peft(self, settings: dict[str, Any]) -> None:
        model = lora(**settings)
        pamm.convert(model, CONFIG)
        assert_as_peft(model, lora(**settings))

    def test_with_every_row_kept_that_is_too(self, settings: dict[str, Any]) -> None:
        model = lora(**settings)
        pamm.convert(model, exact_config())
        (_, gradients), (_, expected) = step(model), step(lora(**settings))
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=2e-2, atol=1e-5)


def held(model: nn.Module, names: dict[str, list[str]], autocast: bool = False) -> int:
    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(input_ids=ids())

    return sum(saved_bytes(model, names, forward).values())


def casts(model: nn.Module, autocast: bool) -> int:
    """How many tensors of X's shape change their dtype in one forward pass."""

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default:
                self.number += made.shape == (2, TOKENS // 2, WIDTH)
            return made

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Count() as count:
        model(input_ids=ids())
    return count.number


class TestBytes:
    @pytest.mark.parametrize(
        ("settings", "copies", "states"),
        [
            ({}, 3 * 4, 1),
            ({"adapter_fp32": False}, 2, 1),
            ({"lora_dropout": 0.05}, 3 * 4, 3),
            ({"adapter_fp32": False, "lora_dropout": 0.05}, 3 * 2, 3),
        ],
        ids=["fp32", "bf16", "fp32, dropout", "bf16, dropout"],
    )
    def test_are_as_predicted(self, settings: dict[str, Any], copies: int, states: int) -> None:
        plain, model = lora(**settings), lora(**settings)
        report = pamm.convert(model, CONFIG)
        names = group_layers(model)
        assert held(plain, names) == report.exact_bytes(TOKENS) == BLOCKS * TOKENS * WIDTH * copies
        assert held(model, names) == report.held_bytes(TOKENS)
        assert len(report.converted) == BLOCKS * states

    def test_under_autocast(self) -> None:
        """PEFT keeps three bf16 copies there; the state is the same as without."""
        plain, model = lora(), lora()
        report = pamm.convert(model, CONFIG)
        names = group_layers(model)
        assert held(plain, names, autocast=True) == BLOCKS * TOKENS * WIDTH * 3 * 2
        assert held(model, names, autocast=True) == report.held_bytes(TOKENS)

    def test_the_exact_method_shares_one_copy(self) -> None:
        model = lora()
        report = pamm.convert(model, pamm.PammConfig(method="exact"))
        assert held(model, group_layers(model)) == report.held_bytes(TOKENS)
        assert report.held_bytes(TOKENS) == report.exact_bytes(TOKENS) / 6
        assert_as_peft(model, lora(), approximate="nothing")

    @pytest.mark.parametrize(("dropout", "compressions"), [(0.0, 1), (0.05, 3)])
    def test_one_compression_for_each_tensor(self, dropout: float, compressions: int) -> None:
        model = lora(lora_dropout=dropout)
        pamm.convert(model, CONFIG)
        with counted_compressions(groups(model)) as shapes:
            step(model)
        assert shapes == [(TOKENS, WIDTH)] * BLOCKS * compressions

    @pytest.mark.parametrize(("autocast", "fewer"), [(False, 2), (True, 6)])
    def test_one_cast_of_x_serves_q_k_and_v(self, autocast: bool, fewer: int) -> None:
        """PEFT makes three, and under autocast three more, back to the dtype that X had."""
        plain, model = lora(), lora()
        pamm.convert(model, CONFIG)
        assert casts(plain, autocast) - casts(model, autocast) == fewer * BLOCKS

    def test_dora_sends_its_identity_through_uncompressed(self) -> None:
        model = lora(use_dora=True, base=llama())
        pamm.convert(model, CONFIG)
        with counted_compressions(groups(model)) as shapes:
            model(input_ids=ids()[:, :5])
        assert shapes == [(10, WIDTH)] * BLOCKS * 3

    def test_checkpointed(self) -> None:
        model, plain = lora(), lora()
        pamm.convert(model, CONFIG)
        for each in (model, plain):
            name = "activation_checkpointing_enable"  # as Transformers calls it since 5.20
            enable = getattr(each, name, None) or each.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        assert_as_peft(model, plain)


class TestAdapters:
    def test_one_added_later_works_and_is_converted_by_the_next_call(self) -> None:
        model, plain = lora(), lora()
        pamm.convert(model, CONFIG)
        for each in (model, plain):
            torch.manual_seed(4)
            each.add_adapter("other", lora_config(r=2))
            each.set_adapter("other")
        assert_as_peft(model, plain, approximate="nothing")
        report = pamm.convert(model, CONFIG)
        assert report.converted[0].name == f"{BLOCK}.{{q_proj,k_proj,v_proj}}.lora_A.other"
        assert {skipped.reason for skipped in report.skipped} == {"already converted"}
        with counted_compressions(groups(model)) as shapes:
            assert_as_peft(model, plain)
        assert len(shapes) == BLOCKS
        for each in (model, plain):
            each.set_adapter("default")
        assert_as_peft(model, plain)

    def test_those_not_trained_are_left_out_with_the_reason(self) -> None:
        model = lora()
        model.add_adapter("other", lora_config())
        (skipped, *_) = pamm.convert(model, CONFIG).skipped
        assert skipped.name.endswith("lora_A.other")
        assert "frozen" in skipped.reason

    def test_two_at_once_share_what_pefts_cast_makes(self) -> None:
        model, plain = lora(), lora()
        for each in (model, plain):
            torch.manual_seed(4)
            each.add_adapter("other", lora_config())
            each.base_model.set_adapter(["default", "other"])
        report = pamm.convert(model, CONFIG)
        assert report.converted[0].name == f"{BLOCK}.q_proj.lora_A.{{default,other}}"
        with counted_compressions(groups(model)) as shapes:
            assert_as_peft(model, plain)
        assert len(shapes) == len(report.converted) == 3 * BLOCKS
        names = group_layers(model)
        assert held(plain, names) == report.exact_bytes(TOKENS)
        assert held(model, names) == report.held_bytes(TOKENS)

    def test_eval_and_mixed_batches_are_as_in_peft(self) -> None:
        model, plain = lora(), lora()
        pamm.convert(model, CONFIG)
        for each in (model, plain):
            torch.manual_seed(4)
            each.add_adapter("other", lora_config())
            each.eval()
        names = ["default", "other"]
        with torch.no_grad():
            assert torch.equal(model(ids()).logits, plain(ids()).logits)
            a, b = (each(ids(), adapter_names=names).logits for each in (model, plain))
        assert torch.equal(a, b)

    def test_merge_unmerge_and_unload(self) -> None:
        model, plain = lora(), lora()
        pamm.convert(model, CONFIG)
        for each in (model, plain):
            each.merge_adapter()
        assert torch.equal(model(ids()).logits, plain(ids()).logits)
        for each in (model, plain):
            each.unmerge_adapter()
        assert_as_peft(model, plain)
        merged = model.merge_and_unload()
        assert not adapters(merged)
        assert torch.equal(merged(ids()).logits, plain.merge_and_unload()(ids()).logits)

    def test_disabled(self) -> None:
        model, plain = lora(), lora()
        pamm.convert(model, CONFIG)
        with model.disable_adapter(), plain.disable_adapter():
            assert torch.equal(model(ids()).logits, plain(ids()).logits)
        assert_as_peft(model, plain)

    def test_layers_trained_in_full_share_with_the_others(self) -> None:
        settings = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["k_proj"]}
        model, plain = lora(**settings), lora(**settings)
        report = pamm.convert(model, CONFIG)
        assert len(report.converted) == BLOCKS
        assert (len(pamm_layers(model)), len(adapters(model))) == (3 * BLOCKS, 2 * BLOCKS)
        with counted_compressions(groups(model)) as shapes:
            (logits, _), (expected, _) = step(model), step(plain)
        assert len(shapes) == BLOCKS
        assert torch.equal(logits, expected)

    @pytest.mark.parametrize("method", ["pamm", "sampled", "recompute"])
    @pytest.mark.parametrize("names", [NAMES, ("q_proj", "v_proj")])
    def test_around_a_converted_model_frees_nothing_and_that_is_told(
        self, method: str, names: tuple[str, ...]
    ) -> None:
        base, config = llama(), pamm.PammConfig(method)
        pamm.convert(base, config)
        model, plain = (lora(base=each, target_modules=list(names)) for each in (base, llama()))
        with pytest.warns(UserWarning, match=r"pamm.convert\(model\) after get_peft_model"):
            assert_as_peft(model, plain, approximate="nothing")
        with pytest.raises(pamm.PammError, match=r"call pamm.convert\(model\) first"):
            pamm.seek(model, 0)
        pamm.convert(model, config)
        assert len(adapters(model)) == len(names) * BLOCKS
        assert_as_peft(model, plain, "nothing" if method == "recompute" else "lora_A")
        assert pamm.revert(model) == len(names) * BLOCKS  # and not the frozen layers

    def test_it_is_told_once(self) -> None:
        base = llama()
        pamm.convert(base, CONFIG)
        model = lora(base=base)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step(model)
            step(model)
        assert len(told) == BLOCKS

    @pytest.mark.parametrize("method", ["pamm", "sampled", "recompute"])
    def test_what_peft_did_not_wrap_stays_converted(self, method: str) -> None:
        base, config = llama(), pamm.PammConfig(method)
        pamm.convert(base, config)
        model = lora(base=base, layers_to_transform=[1])
        pamm.convert(model, config)
        model.requires_grad_(True)
        assert pamm.revert(model.base_model.model.model.layers[0]) == 3

    @pytest.mark.filterwarnings("ignore:all weights of a converted group are frozen")  # block 0
    @pytest.mark.parametrize("then", ["pamm", "recompute"])
    def test_norms_whose_readers_are_reverted_run_once_again(self, then: str) -> None:
        base = llama()
        pamm.convert(base, pamm.PammConfig("recompute"))
        model = lora(base=base, layers_to_transform=[1])
        pamm.convert(model, pamm.PammConfig(then))
        again = [name for name, m in model.named_modules() if isinstance(m, Recomputed)]
        assert [name.split(".")[4] for name in again] == ["0"] + ["1"] * (then == "recompute")
        (logits, _), (expected, _) = step(model), step(lora(layers_to_transform=[1]))
        assert torch.equal(logits, expected)

    @pytest.mark.parametrize("covered", ["self_attn.k_proj.base_layer", "input_layernorm"])
    def test_where_one_cannot_be_reverted_nothing_is_changed(self, covered: str) -> None:
        base = llama()
        pamm.convert(base, pamm.PammConfig("recompute"))
        model = lora(base=base)
        layer = model.get_submodule(f"base_model.model.model.layers.1.{covered}")
        layer.forward = layer.forward
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(pamm.PammError, match=rf"layers\.1\.{covered} was given a forward"):
            pamm.convert(model, CONFIG)
        assert {name: type(module) for name, module in model.named_modules()} == before

    @pytest.mark.parametrize("method", ["pamm", "recompute"])
    def test_frozen_for_a_while_it_counts_as_converted(self, method: str) -> None:
        model = lora()
        pamm.convert(model, pamm.PammConfig(method))
        model.requires_grad_(False)
        assert is_converted(model)
        pamm.seek(model, 7)
        assert [int(group.stream.position) >> 32 for group in groups(model)] == [7] * BLOCKS

    def test_a_base_that_is_trained_as_well(self) -> None:
        model = lora()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("base_layer" in name or "lora_" in name)
        report = pamm.convert(model, CONFIG)
        assert len(report.converted) == BLOCKS
        assert (len(pamm_layers(model)), len(adapters(model))) == (6 * BLOCKS, 3 * BLOCKS)
        names = group_layers(model)
        assert held(model, names) == report.held_bytes(TOKENS)


def adapters(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, PammAdapter)]


class TestSwitch:
    def test_revert_gives_everything_back(self) -> None:
        model, plain = lora(), lora()
        pamm.convert(model, CONFIG)
        assert pamm.revert(model) == 3 * BLOCKS
        assert {type(m) for m in model.modules()} == {type(m) for m in plain.modules()}
        assert model.get_submodule(f"{BLOCK}.q_proj").cast_input_dtype_enabled is True
        assert_as_peft(model, plain, approximate="nothing")

    def test_pefts_own_switch_still_works(self) -> None:
        model = lora()
        pamm.convert(model, CONFIG)
        model.eval()
        with peft.helpers.disable_input_dtype_casting(model):
            model(ids())  # lora_A casts by itself
        model.train()
        assert_as_peft(model, lora())
        pamm.revert(model)
        assert_as_peft(model, lora(), approximate="nothing")


READ_X = {name: SETTINGS[name] for name in ("fp32", "bf16", "q and v", "rank-stabilised")}


@pytest.mark.parametrize("settings", READ_X.values(), ids=READ_X.keys())
class TestXMadeAgain:
    """Behind PEFT's cast too: fp32 adapters on a base in bf16 are its default."""

    @pytest.mark.parametrize("autocast", [False, True])
    def test_recomputing_changes_no_bit(self, settings: dict[str, Any], autocast: bool) -> None:
        model, plain = lora(**settings), lora(**settings)
        pamm.convert(model, pamm.PammConfig("recompute"))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_as_peft(model, plain, approximate="nothing")

    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("method", ["recompute", "sampled"])
    def test_nothing_of_x_is_held(
        self, settings: dict[str, Any], method: str, autocast: bool
    ) -> None:
        model = lora(**settings)
        model.enable_input_require_grads()  # else the first X depends on no weight, and is kept
        report = pamm.convert(model, pamm.PammConfig(method))
        assert len(report.converted) == BLOCKS
        expected = BLOCKS * 8 if method == "sampled" else 0
        assert held(model, group_layers(model), autocast) == report.held_bytes(TOKENS) == expected
        if method == "sampled":
            with watch(model) as watched:
                step(model)
            assert watched.metrics()["held_bytes"] == expected
        else:
            with pytest.raises(pamm.PammError, match=r"nothing to watch.*exact"), watch(model):
                pass

    def test_sampling_leaves_all_but_lora_A_as_in_peft(self, settings: dict[str, Any]) -> None:
        model = lora(**settings)
        pamm.convert(model, pamm.PammConfig("sampled", 1 / 4))
        assert_as_peft(model, lora(**settings))


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda: {"velora_config": peft.VeloraConfig(num_groups=8)}, "VeloraLinearVariant"),
            (lambda: {"target_parameters": ["q_proj.weight"]}, "ParamWrapper"),
        ],
        ids=["VeLoRA", "parameters"],
    )
    def test_variants_that_use_the_weight_alone(
        self, change: Callable[[], dict[str, Any]], reason: str
    ) -> None:
        settings = change()
        if "target_parameters" in settings:
            settings["target_modules"] = []
        with pytest.raises(pamm.NothingToConvertError, match=f"PEFT's {reason}"):
            pamm.convert(lora(**settings), CONFIG)

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"use_dora": True}, "X is no module's output"),
            ({"lora_dropout": 0.05}, "lora_dropout.default, which makes X, draws random numbers"),
        ],
        ids=["DoRA", "dropout"],
    )
    def test_an_x_that_cannot_be_made_again(self, settings: dict[str, Any], reason: str) -> None:
        with pytest.raises(pamm.NothingToConvertError, match=reason):
            pamm.convert(lora(**settings), pamm.PammConfig("recompute"))

    def test_adalora(self) -> None:
        config = peft.AdaLoraConfig(target_modules=list(NAMES), total_step=10)
        model = peft.get_peft_model(llama(), config)
        with pytest.raises(pamm.NothingToConvertError, match="is SVDLinear, not nn"):
            pamm.convert(model, CONFIG)


class TestSaving:
    def test_keys_are_those_of_peft(self) -> None:
        model, plain = lora(), lora()
        pamm.convert(model, CONFIG)
        assert model.state_dict().keys() == plain.state_dict().keys()
        keys = peft.get_peft_model_state_dict
        assert keys(model).keys() == keys(plain).keys()

    def test_saved_adapters_load_where_pamm_is_not_installed(self, tmp_path: Path) -> None:
        model = lora()
        pamm.convert(model, CONFIG)
        optimizer = torch.optim.SGD(pamm.param_groups(model, lr=0.1, lr_factor=1.0))
        step(model)
        optimizer.step()
        model.save_pretrained(tmp_path / "adapter")
        llama().save_pretrained(tmp_path / "base")
        torch.save(model.eval()(ids()).logits, tmp_path / "logits.pt")
        script = (
            "import sys, torch, transformers; sys.modules['pamm'] = None; import peft\n"
            "base = transformers.AutoModelForCausalLM.from_pretrained('base', dtype='bfloat16')\n"
            "model = peft.PeftModel.from_pretrained(base, 'adapter').eval()\n"
            "ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(2))\n"
            "assert torch.equal(model(ids).logits, torch.load('logits.pt'))\n"
        )
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)

    def test_loaded_adapters_convert(self, tmp_path: Path) -> None:
        lora().save_pretrained(tmp_path)
        model = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True).train()
        pamm.convert(model, CONFIG)
        assert_as_peft(model, lora())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, when it is imported
def test_on_a_4_bit_base(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)

    def qlora() -> Any:
        four_bit = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        base = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=four_bit, dtype=torch.bfloat16, device_map="cpu"
        )
        return lora(base=base)

    model, plain = qlora(), qlora()
    report = pamm.convert(model, CONFIG)
    names = group_layers(model)
    assert held(plain, names) == report.exact_bytes(TOKENS) == BLOCKS * TOKENS * WIDTH * 3 * 4
    assert held(model, names) == report.held_bytes(TOKENS)
    assert_as_peft(model, plain)
