"""Which layers a forward pass shows to be a group, and what it shows to be none."""

import pytest
import torch
from torch import Tensor, nn

import pamm
from pamm.groups import TARGETS, leaves
from tests.helpers import NAMES, Attention, Model, pamm_layers, saved_bytes, saved_tensors

CONFIG = pamm.PammConfig("pamm", 1 / 8)
X = torch.randn(2, 20, 16)


class Projections(nn.Module):
    """q, k and v, each of what the subclass gives it."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return sum(getattr(self, name)(each) for name, each in self.given(x).items())  # type: ignore[return-value]

    def given(self, x: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(NAMES, x)


def kept(model: nn.Module, *inputs: Tensor) -> int:
    with saved_tensors() as saved:
        y = model(*inputs)
    size = saved_bytes(saved, list(model.parameters()))
    del y
    return size


def names(report: pamm.Report) -> list[str]:
    return [group.name for group in report.converted]


def freed(report: pamm.Report, tokens: int = 40) -> int:
    return report.exact_bytes(tokens) - report.held_bytes(tokens)


class Positioned(Projections):
    def given(self, x: Tensor) -> dict[str, Tensor]:
        positioned = x + 1
        return {"q_proj": positioned, "k_proj": positioned, "v_proj": x}


class Borrowing(Projections):
    """Its k and v are those of another layer."""

    def given(self, x: Tensor) -> dict[str, Tensor]:
        return {"q_proj": x}


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (Projections(), ["{q_proj,k_proj,v_proj}"]),
        (Positioned(), ["{q_proj,k_proj}", "v_proj"]),
        (Borrowing(), ["q_proj"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_groups_are_layers_that_receive_the_same_tensor(
    model: Projections, groups: list[str]
) -> None:
    before = kept(model, X)
    report = pamm.convert(model, CONFIG, example=X)
    assert names(report) == groups
    assert all(group.confirmed for group in report.converted)
    assert before - kept(model, X) == freed(report)
    assert "by names alone" not in str(report)


class Decoder(nn.Module):
    """Cross-attention: every layer reads the encoder's states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Projections() for _ in range(3))

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        for layer in self.layers:
            k_and_v = layer.k_proj(states) + layer.v_proj(states)
            x = x + (layer.q_proj(x) * k_and_v).tanh()
        return x


def test_states_that_every_layer_reads_are_one_group() -> None:
    model, states = Decoder(), torch.randn(2, 20, 16)
    before = kept(model, X, states)
    report = pamm.convert(model, CONFIG, example=(X, states))
    assert names(report) == [
        "layers.0.q_proj", "layers.{0..2}.{k_proj,v_proj}", "layers.1.q_proj", "layers.2.q_proj"
    ]  # fmt: skip
    # All four inputs, of which the first and the states are the caller's own.
    assert before - kept(model, X, states) == freed(report)


def test_such_a_group_is_not_cut_but_its_block_may_be_selected() -> None:
    model = Decoder()
    report = pamm.convert(model, CONFIG, example=(X, X.clone()), include="layers.0.*")
    assert names(report) == ["layers.0.q_proj"]
    (skipped,) = [each for each in report.skipped if "k_proj" in each.name]
    assert skipped.reason.startswith("selected in part, and layers.1.k_proj")


class BothInputs(Projections):
    """k and v read this layer's input and then the encoder's."""

    def given(self, x: Tensor) -> dict[str, Tensor]:
        self.other = self.k_proj(self.states) + self.v_proj(self.states)
        return super().given(x)

    states = torch.randn(30, 16)


def test_layers_that_read_two_tensors_keep_a_state_of_each() -> None:
    model = BothInputs()
    before = kept(model, X)
    report = pamm.convert(model, CONFIG, example=X)
    assert names(report) == ["{q_proj,k_proj,v_proj}"]
    assert before - kept(model, X) == freed(report, 40) + freed(report, 30)


class Parallel(nn.Module):
    """Attention and MLP read one norm's output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(16, 32), "fc2": nn.Linear(32, 16)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.attention(x) + self.mlp["fc2"](self.mlp["fc1"](x).relu())


class TestOtherReaders:
    def test_are_the_reason_to_refuse(self) -> None:
        with pytest.raises(
            pamm.NothingToConvertError,
            match=r"the same input is also kept by mlp\.fc1; convert them all with widen=True",
        ):
            pamm.convert(Parallel(), CONFIG, example=X)

    @pytest.mark.parametrize(
        "options", [{"widen": True}, {"targets": ("attention", "mlp")}], ids=str
    )
    def test_or_are_converted_with_the_group(self, options: dict[str, bool]) -> None:
        model = Parallel()
        before = kept(model, X)
        report = pamm.convert(model, CONFIG, example=X, **options)  # type: ignore[arg-type]
        assert names(report) == ["{attention.{q_proj,k_proj,v_proj},mlp.fc1}"]
        assert before - kept(model, X) == freed(report)

    def test_but_not_if_excluded(self) -> None:
        with pytest.raises(pamm.NothingToConvertError, match=r"kept by mlp\.fc1, which is exclu"):
            pamm.convert(Parallel(), CONFIG, example=X, widen=True, exclude="mlp.*")

    def test_include_is_about_what_is_looked_for(self) -> None:
        report = pamm.convert(Parallel(), CONFIG, example=X, widen=True, include="attention.*")
        assert len(report.converted[0].out_features) == 4

    def test_that_are_no_linear_layers_are_named(self) -> None:
        class Squaring(Projections):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(16)

            def forward(self, x: Tensor) -> Tensor:
                x = self.norm(x)
                return super().forward(x) + x.square()

        with pytest.raises(pamm.NothingToConvertError) as error:
            pamm.convert(Squaring(), CONFIG, example=X, widen=True)
        assert "also kept by the model" in str(error.value)
        assert "widen" not in str(error.value)

    def test_a_parameter_as_input_is_there_anyway(self) -> None:
        class Queries(Projections):
            def __init__(self) -> None:
                super().__init__()
                self.queries = nn.Parameter(torch.randn(40, 16))

            def given(self, x: Tensor) -> dict[str, Tensor]:
                return {"q_proj": self.queries.expand(2, 40, 16), "k_proj": x, "v_proj": x}

        report = pamm.convert(Queries(), CONFIG, example=torch.randn(2, 40, 16))
        assert names(report) == ["{k_proj,v_proj}"]
        assert "memory of a parameter" in report.skipped[0].reason


class TestByNamesAlone:
    def test_without_an_example(self) -> None:
        report = pamm.convert(Model(), CONFIG)
        assert report.problem == (
            "this model does not say what it takes; give convert an example of it"
        )
        assert not report.converted[0].confirmed
        assert "by names alone, not confirmed by a forward pass: this model does" in str(report)

    def test_where_the_example_fails(self) -> None:
        report = pamm.convert(Model(), CONFIG, example=torch.randn(2, 3))
        assert len(report.converted) == 2
        assert report.problem is not None
        assert report.problem.startswith("RuntimeError: ")

    def test_parts_that_did_not_run(self) -> None:
        model = Model()
        model.add_module("spare", Attention())
        report = pamm.convert(model, CONFIG, example=X)
        assert [group.confirmed for group in report.converted] == [True, True, False]
        assert "spare.{q_proj,k_proj,v_proj} by names alone" in str(report)


class TestTargets:
    @pytest.mark.parametrize("names", TARGETS["mlp"], ids="/".join)
    def test_the_mlp_is_found_by_name(self, names: tuple[str, ...]) -> None:
        model = nn.ModuleDict({name: nn.Linear(8, 4) for name in names})
        (group,) = pamm.convert(model, CONFIG, targets="mlp").converted
        assert len(group.out_features) == len(names)

    def test_with_settings_of_their_own(self) -> None:
        class Block(Parallel):
            def __init__(self) -> None:
                super().__init__()
                self.mlp_norm = nn.LayerNorm(16)

            def forward(self, x: Tensor) -> Tensor:
                y = self.attention(self.norm(x))
                return y + self.mlp["fc2"](self.mlp["fc1"](self.mlp_norm(x)).relu())

        model = Block()
        pamm.convert(model, CONFIG, example=X)
        report = pamm.convert(model, pamm.PammConfig("uniform_crs"), targets="mlp", example=X)
        assert names(report) == ["mlp.fc1"]
        assert [layer.pamm_group.method.config.method for layer in pamm_layers(model)] == [
            *["pamm"] * 3, "uniform_crs"
        ]  # fmt: skip

    @pytest.mark.parametrize("targets", ["attn", ["attention", "attn"], []])
    def test_unknown_ones(self, targets: object) -> None:
        with pytest.raises(pamm.PammError, match="choose from attention, mlp"):
            pamm.convert(Model(), targets=targets)  # type: ignore[arg-type]


def test_layers_inside_a_wrapper() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).clamp(-1, 1)

    model = Projections()
    model.k_proj = Wrapper()
    assert list(leaves(model.k_proj)) == ["linear"]
    assert list(leaves(model.q_proj)) == [""]
    report = pamm.convert(model, CONFIG, example=X)
    assert names(report) == ["{q_proj,v_proj,k_proj.linear}"]


@pytest.mark.parametrize("example", [None, X], ids=["by names", "probed"])
def test_layers_that_modules_share_are_in_one_group(example: Tensor | None) -> None:
    model = Model()
    first, second = (layer.attention for layer in model.layers)
    second.k_proj, second.v_proj = first.k_proj, first.v_proj
    report = pamm.convert(model, CONFIG, example=example)
    assert (
        sum(len(group.out_features) for group in report.converted) == len(pamm_layers(model)) == 4
    )
    model(X).sum().backward()
    assert pamm.revert(model) == 4
