"""Which groups are found, which are refused and why, and what the report says."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import pamm
from pamm.fidelity import watch
from pamm.groups import TARGETS
from pamm.nn import groups
from pamm.padding import skip_padding
from pamm.report import ConvertedGroup, Report
from tests.helpers import Attention, Model, pamm_layers

SIBLINGS = TARGETS["attention"]
CONFIG = pamm.PammConfig("pamm", 1 / 8)


def siblings(names: tuple[str, ...], features: tuple[int, ...] | None = None) -> nn.ModuleDict:
    features = features or (8,) * len(names)
    return nn.ModuleDict({name: nn.Linear(n, 4) for name, n in zip(names, features, strict=True)})


@pytest.mark.parametrize("names", SIBLINGS, ids="/".join)
def test_siblings_are_found_by_name_at_any_depth(names: tuple[str, ...]) -> None:
    model = nn.ModuleDict({"deep": nn.ModuleList([siblings(names), siblings(names)])})
    report = pamm.convert(model, CONFIG)
    listed = f"{{{','.join(names)}}}" if len(names) > 1 else names[0]
    assert [g.name for g in report.converted] == [f"deep.0.{listed}", f"deep.1.{listed}"]
    assert len(pamm_layers(model)) == 2 * len(names)


def test_the_root_may_be_the_attention_itself() -> None:
    assert pamm.convert(Attention(), CONFIG).converted[0].name == "{q_proj,k_proj,v_proj}"


def test_only_the_given_model_is_touched() -> None:
    model, other = Model(), Model()
    pamm.convert(model, CONFIG)
    assert not pamm_layers(other)
    assert type(nn.Linear(2, 2)) is nn.Linear


def test_other_layers_are_left_alone() -> None:
    model = Model()
    pamm.convert(model, CONFIG)
    changed = {name for name, m in model.named_modules() if type(m).__name__ == "PammLinear"}
    assert changed == {f"layers.{i}.attention.{n}" for i in range(2) for n in SIBLINGS[0]}


class TestSelection:
    @pytest.mark.parametrize(
        ("include", "exclude", "blocks"),
        [
            ("layers.0.*", None, [0]),
            (["layers.0.*", "layers.2.*"], None, [0, 2]),
            (lambda name: "layers.1." in name, None, [1]),
            (None, "layers.1.*", [0, 2]),
            ("layers.*", lambda name: name.startswith("layers.0."), [1, 2]),
        ],
    )
    def test_by_pattern_list_or_function(
        self, include: object, exclude: object, blocks: list[int]
    ) -> None:
        model = Model(layers=3)
        report = pamm.convert(model, CONFIG, include=include, exclude=exclude)  # type: ignore[arg-type]
        expected = [f"layers.{i}.attention.{{q_proj,k_proj,v_proj}}" for i in blocks]
        assert [group.name for group in report.converted] == expected
        assert {s.reason for s in report.skipped} == {"not selected by include and exclude"}

    @pytest.mark.parametrize(
        ("include", "exclude"),
        [("*q_proj", None), (["*q_proj", "*k_proj"], None), (None, "*v_proj")],
    )
    def test_part_of_a_group_is_refused_and_nothing_changed(
        self, include: object, exclude: object
    ) -> None:
        model = Model()
        with pytest.raises(pamm.PartialGroupError, match=r"v_proj.*frees no memory.*Select all"):
            pamm.convert(model, CONFIG, include=include, exclude=exclude)  # type: ignore[arg-type]
        assert not pamm_layers(model)


class TestRefused:
    @staticmethod
    def reason(model: nn.Module) -> str:
        model = nn.ModuleDict({"bad": model, "good": Attention()})
        report = pamm.convert(model, CONFIG)
        assert [group.name for group in report.converted] == ["good.{q_proj,k_proj,v_proj}"]
        (skipped,) = report.skipped
        assert skipped.name == "bad.{q_proj,k_proj,v_proj}"
        assert skipped.reason in str(report)
        return skipped.reason

    def test_inputs_of_different_width(self) -> None:
        model = siblings(SIBLINGS[0], (8, 16, 16))
        assert self.reason(model) == "inputs of 8 and 16 features are not one tensor"

    def test_subclasses_with_a_forward_of_their_own(self) -> None:
        class Scaled(nn.Linear):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(input)

        model = siblings(SIBLINGS[0])
        model["k_proj"] = Scaled(8, 4)
        assert self.reason(model) == "bad.k_proj is Scaled, not nn.Linear"

    def test_wrapped_layers(self) -> None:
        model = siblings(SIBLINGS[0])
        model["q_proj"] = nn.Sequential(nn.Linear(8, 4))
        assert self.reason(model) == "bad.q_proj is Sequential, not nn.Linear"

    def test_weights_of_another_class(self) -> None:
        class Quantised(nn.Parameter):
            pass

        model = siblings(SIBLINGS[0])
        model["v_proj"].weight = Quantised(torch.randn(4, 8))
        assert self.reason(model) == "the weight of bad.v_proj is Quantised, not a plain Parameter"

    def test_frozen_weights(self) -> None:
        model = siblings(SIBLINGS[0]).requires_grad_(False)
        assert "frozen" in self.reason(model)


class TestNothing:
    def test_no_attention(self) -> None:
        with pytest.raises(
            pamm.NothingToConvertError, match="q_proj/k_proj/v_proj, query/key/value"
        ):
            pamm.convert(nn.Sequential(nn.Linear(2, 2)))

    def test_a_pattern_that_matches_nothing(self) -> None:
        with pytest.raises(pamm.NothingToConvertError, match="not selected by include"):
            pamm.convert(Model(), include="encoder.*")

    @pytest.mark.parametrize("method", ["recompute", "sampled"])
    def test_an_example_that_does_not_fit_the_model(self, method: str) -> None:
        with pytest.raises(pamm.NothingToConvertError, match=r"No forward pass.*9") as refused:
            pamm.convert(Model(), pamm.PammConfig(method), example=torch.randn(4, 9))
        assert "example" not in str(refused.value)

    def test_a_model_that_needs_more_than_it_says_is_helped_by_an_example(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
        model.model.layers[0].self_attn.o_proj = nn.Linear(3, 3)  # nothing of it runs
        with pytest.raises(pamm.NothingToConvertError, match="give convert an example of the arg"):
            pamm.convert(model)

    def test_an_example_that_does_not_run_the_layers(self) -> None:
        model = Model()
        model.add_module("other", Attention())
        config = pamm.PammConfig("recompute")
        with pytest.raises(pamm.NothingToConvertError, match="give an example that runs these"):
            pamm.convert(model, config, include="other.*", example=torch.randn(2, 5, 16))

    def test_converting_twice(self) -> None:
        model = Model()
        pamm.convert(model, CONFIG)
        with pytest.raises(pamm.NothingToConvertError, match="already converted"):
            pamm.convert(model, CONFIG)

    def test_converting_the_rest_later(self) -> None:
        model = Model()
        pamm.convert(model, CONFIG, include="layers.0.*")
        assert len(pamm.convert(model, CONFIG).converted) == 1
        assert len(pamm_layers(model)) == 6

    def test_reverting_an_unconverted_model_is_harmless(self) -> None:
        assert pamm.revert(Model()) == 0

    @pytest.mark.parametrize(
        ("method", "name"),
        [("pamm", "q_proj"), ("recompute", "q_proj"), ("sampled", "q_proj"), ("sampled", "norm")],
    )
    def test_reverting_under_a_parametrization(self, method: str, name: str) -> None:
        model, x = Model(layers=2), torch.randn(2, 5, 16)
        pamm.convert(model, pamm.PammConfig(method), example=x)
        layer = model.layers[1].get_submodule("norm" if name == "norm" else f"attention.{name}")
        parametrize.register_parametrization(layer, "weight", nn.Identity())
        before = [type(module) for module in model.modules()]
        with pytest.raises(pamm.PammError, match=rf"layers\.1\.\S*{name} is .*Remove it before"):
            pamm.revert(model)
        assert [type(module) for module in model.modules()] == before
        model(x).sum().backward()
        parametrize.remove_parametrizations(layer, "weight")
        assert pamm.revert(model) == 6
        assert type(layer) is (nn.LayerNorm if name == "norm" else nn.Linear)

    def test_seeking_in_an_unconverted_model(self) -> None:
        with pytest.raises(pamm.PammError, match="no PAMM layers"):
            pamm.seek(Model(), 0)

    def test_seeking_before_the_start(self) -> None:
        model = Model()
        pamm.convert(model, pamm.PammConfig("pamm"))
        with pytest.raises(pamm.PammError, match="0 or above"):
            pamm.seek(model, -1)


@pytest.mark.parametrize("config", [{"ratio": 0.5}, "recompute", {}, ""], ids=repr)
def test_a_configuration_of_another_kind_is_refused(config: object) -> None:
    model = Model()
    with pytest.raises(pamm.PammError, match=r"config is .*give a PammConfig"):
        pamm.convert(model, config)  # type: ignore[arg-type]
    assert not pamm_layers(model)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda _: pamm.convert(None), "model is NoneType; give the model itself"),  # type: ignore[arg-type]
        (lambda _: pamm.revert("gpt2"), "model is str"),  # type: ignore[arg-type]
        (lambda m: pamm.seek(m.parameters(), 1), "model is generator"),
        (lambda _: pamm.carried(Model), "model is type"),  # type: ignore[arg-type]
        (lambda _: watch("m").__enter__(), "model is str"),  # type: ignore[arg-type]
        (lambda _: skip_padding("m"), "model is str"),  # type: ignore[arg-type]
        (lambda m: pamm.convert(m, targets=None), "targets is None; choose from"),
        (lambda m: pamm.convert(m, targets=[["mlp"]]), "targets is .*; choose from"),
        (lambda m: pamm.convert(m, include=3), "include is 3; give a pattern"),
        (lambda m: pamm.convert(m, exclude=[3]), r"exclude is \[3\]; give a pattern"),
        (lambda m: pamm.convert(m, example=3), "example is int; give arguments"),
        (lambda m: pamm.convert(m, example="text"), "example is str; give arguments"),
        (lambda m: pamm.seek(m, 1.5), "step is 1.5; give the number"),
        (lambda m: pamm.seek(m, None), "step is None; give the number"),
        (lambda m: pamm.restore_carried(m, "file.pt"), "saved is str; give tensors"),
        (lambda m: pamm.restore_carried(m, {"a": 1}), "saved is dict; give tensors"),
        (lambda _: pamm.nn.PammLinear(4, 4), "is made of an nn.Linear"),
    ],
)
def test_arguments_of_another_kind_are_refused(call: Any, says: str) -> None:
    with pytest.raises(pamm.PammError, match=says):
        call(Model())


def test_patterns_may_come_from_a_generator() -> None:
    report = pamm.convert(Model(), CONFIG, include=(f"layers.{i}.*" for i in range(2)))
    assert len(report.converted) == 2


class TestReport:
    def test_counts_what_is_held_in_each_counting(self) -> None:
        """LLaMA 60M at r = 1/512: the paper's tables say 256 MB exact and 3.5 MB."""
        model = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(512, 512, dtype=torch.bfloat16) for n in SIBLINGS[0]})
            for _ in range(8)
        )
        report = pamm.convert(model, pamm.PammConfig("pamm", 1 / 512))
        assert report.exact_bytes(32_768) == 256 << 20
        assert report.paper_bytes(32_768) == int(3.5 * (1 << 20))
        assert report.held_bytes(32_768) == 8 * (64 * 512 * 2 + 32_768 * 3 + 4)

    def test_the_papers_counting_is_for_its_method_alone(self) -> None:
        report = pamm.convert(Model(layers=1), pamm.PammConfig("uniform_crs", 1 / 8))
        assert report.paper_bytes(64) is report.converted[0].paper_bytes(64) is None
        (line,) = (line for line in str(report).splitlines() if "layers.0" in line)
        assert not line.split("│")[-2].strip()

    def test_reads_well(self) -> None:
        model = Model(layers=12)
        text = str(pamm.convert(model, pamm.PammConfig("pamm", 1 / 128, tolerance=0.5)))
        assert "12 groups converted (pamm, ratio 1/128, tolerance 0.5)" in text
        assert "layers.{0..11}.attention.{q_proj,k_proj,v_proj}" in text
        assert "16 -> 16+16+16" in text
        assert "24.00 MiB" in text  # 12 * 32768 * 16 * 4
        assert "3.56 MiB" in text  # the paper's count: 12 * (3 * 256 * 16 * 4 + 8 * 32768)
        assert not any(line.endswith(" ") for line in text.splitlines())

    def test_skipped_groups_are_listed_once_for_each_reason(self) -> None:
        text = str(pamm.convert(Model(layers=4), CONFIG, include="layers.2.*"))
        line = "skipped layers.{0,1,3}.attention.{q_proj,k_proj,v_proj}: not selected by include"
        assert line in text


class TestForwardsOfTheirOwn:
    """As hooks of Accelerate give to layers of a model on several devices."""

    @staticmethod
    def give_own_forward(layer: nn.Module) -> None:
        layer.forward = functools.partial(type(layer).forward, layer)  # type: ignore[method-assign]

    @pytest.mark.parametrize("method", ["pamm", "sampled", "recompute"])
    def test_such_layers_are_refused(self, method: str) -> None:
        model, x = Model(), torch.zeros(2, 5, 16)
        for name, layer in model.named_modules():
            if name.endswith("q_proj"):
                self.give_own_forward(layer)
        with pytest.raises(pamm.NothingToConvertError, match=r"q_proj was given a forward.*Accel"):
            pamm.convert(model, pamm.PammConfig(method), example=x)

    def test_so_is_such_a_norm(self) -> None:
        model, x = Model(), torch.zeros(2, 5, 16)
        for layer in model.layers:
            self.give_own_forward(layer.norm)  # type: ignore[arg-type]
        with pytest.raises(pamm.NothingToConvertError, match="norm was given a forward"):
            pamm.convert(model, example=x)
        assert pamm.convert(model, pamm.PammConfig("pamm"), example=x).converted

    def test_given_later_it_keeps_them_from_being_reverted(self) -> None:
        model, x = Model(), torch.zeros(2, 5, 16)
        pamm.convert(model, pamm.PammConfig("pamm"), example=x)
        self.give_own_forward(model.layers[1].attention.k_proj)  # type: ignore[union-attr, arg-type]
        with pytest.raises(pamm.PammError, match=r"k_proj was given a forward.*before pamm.revert"):
            pamm.revert(model)
        assert model.layers[0].attention.q_proj.pamm_group  # type: ignore[union-attr]


def test_a_model_that_is_compiled_before_has_the_same_names_and_draws() -> None:
    plain, compiled = Model(layers=2), torch.compile(Model(layers=2), backend="eager")
    for model in (plain, compiled):
        pamm.convert(model, CONFIG, include="layers.1.*")
    (one,), (other,) = groups(plain), groups(compiled)
    assert one.name == other.name == "layers.1.attention.{q_proj,k_proj,v_proj}"
    cpu = torch.device("cpu")
    assert torch.equal(one.stream.draw(64, 8, cpu), other.stream.draw(64, 8, cpu))


@pytest.mark.parametrize("method", ["pamm", "subspace"])
def test_a_model_converted_in_inference_mode_can_be_trained(method: str) -> None:
    x, plain = torch.randn(2, 5, 16), Model(layers=1)
    model = copy.deepcopy(plain)
    pamm.convert(plain, pamm.PammConfig(method))
    with torch.inference_mode():
        pamm.convert(model, pamm.PammConfig(method))
    for each in (plain, model):
        each(x).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_groups_that_keep_unlike_copies_have_lines_of_their_own() -> None:
    copies = [(torch.bfloat16,), (torch.float32,) * 3, (torch.bfloat16,)]
    alike = {"layers": ("q",), "in_features": 8, "out_features": (8,), "dtype": torch.bfloat16}
    config = pamm.PammConfig("pamm")
    groups = [
        ConvertedGroup(f"blocks.{number}.q", copies=each, config=config, **alike)  # type: ignore[arg-type]
        for number, each in enumerate(copies)
    ]
    table = Report(config, tuple(groups), ()).table(tokens=1024)
    exact = [line.split("│")[4].strip() for line in table.splitlines() if "blocks" in line]
    assert exact == ["32.00 KiB", "96.00 KiB"]  # of two groups, and of one


def test_parts_converted_apart_are_not_watched_and_carry_what_is_theirs() -> None:
    model = nn.ModuleDict({name: Model(layers=1) for name in "ab"})
    for part in model.values():
        pamm.convert(part, pamm.PammConfig("subspace"), example=torch.zeros(2, 5, 16))
    refused = pytest.raises(pamm.PammError, match=r"2 groups are named layers.0.*Convert the whole")
    with refused, watch(model):
        pass
    model["b"](torch.randn(2, 5, 16))
    saved = {name: tensor.clone() for name, tensor in pamm.carried(model).items()}
    name = "layers.0.attention.{q_proj,k_proj,v_proj}"
    assert [saved[f"{name}{number}.passes"].item() for number in ("", " 2")] == [0, 1]
    model["b"](torch.randn(2, 5, 16))
    pamm.restore_carried(model, saved)
    for part, passes in (("a", 0), ("b", 1)):
        assert pamm.carried(model[part])[f"{name}.passes"] == passes


def test_a_block_copied_into_the_model_carries_nothing_where_nothing_is_carried() -> None:
    model = Model()
    pamm.convert(model, CONFIG)
    model.layers.append(copy.deepcopy(model.layers[0]))
    assert pamm.carried(model) == {}


@pytest.mark.parametrize("method", ["pamm", "subspace", "compact", "recompute", "sampled"])
def test_a_model_converted_where_it_is_made_without_weights(method: str) -> None:
    """As torchtitan and Lightning make theirs: meta and another dtype are the defaults then."""
    directions = 2 if method == "sampled" else None
    config = pamm.PammConfig(method, directions=directions)
    was = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = Model()
            pamm.convert(model, config, example=torch.zeros(2, 5, 16))
    finally:
        torch.set_default_dtype(was)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model(torch.randn(2, 5, 16).bfloat16()).float().sum().backward()
    for name, tensor in pamm.carried(model).items():
        assert tensor.dtype == (torch.float32 if name.endswith("axes") else torch.int64)


def test_a_copy_of_a_compiled_layer_has_weights_of_its_own() -> None:
    layer = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("query", "key", "value")})
    pamm.convert(layer, pamm.PammConfig("pamm"))
    layer["query"].compile(backend="eager")
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin["query"].weight.zero_()
        twin["query"].bias.zero_()
    assert twin["query"](torch.ones(3, 8)).eq(0).all()
    assert pickle.loads(pickle.dumps(layer))["query"].weight.equal(layer["query"].weight)
