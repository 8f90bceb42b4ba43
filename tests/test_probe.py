"""What a forward pass without weights sees, and that the model never notices."""

import copy
import gc
import random
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pamm
from pamm.probe import Input, probe
from tests.helpers import NAMES, Model

X = torch.randn(2, 5, 16)


def reader(inputs: list[Input], name: str) -> Input:
    (found,) = [each for each in inputs if name in each.readers]
    return found


def test_readers_keepers_and_maker() -> None:
    inputs = probe(Model(layers=1), X)
    attention = [f"layers.0.attention.{name}" for name in NAMES]
    qkv = reader(inputs, attention[0])
    assert qkv == Input(attention, attention, "layers.0.norm", None, False)
    mlp = reader(inputs, "layers.0.mlp.0")
    assert (mlp.readers, mlp.maker) == (["layers.0.mlp.0"], "layers.0.mlp_norm")
    assert reader(inputs, "head").maker == "layers.0"


class TestTheModelNeverNotices:
    def test_random_states(self) -> None:
        class Random(Model):
            def forward(self, x: Tensor) -> Tensor:
                torch.rand(3), random.random(), np.random.rand()
                return super().forward(x)

        model = Random(dropout=0.5)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        probe(model, X)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert (np.random.get_state()[1] == before[2]).all()

    def test_buffers_mode_hooks_and_gradients(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16)).eval()
        calls: list[str] = []
        model[1].register_forward_hook(lambda *_: calls.append("hook"))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        hooks = len(model[1]._forward_hooks)
        probe(model, torch.randn(4, 16))
        assert not calls
        assert len(model[1]._forward_hooks) == hooks
        assert not model.training
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())

    def test_a_converted_model_stays_converted(self) -> None:
        model = Model()
        pamm.convert(model, pamm.PammConfig("pamm"))
        converted = repr(model)
        assert reader(probe(model, X), "layers.0.attention.q_proj").maker == "layers.0.norm"
        assert repr(model) == converted
        assert pamm.nn.groups(model)[0].stream.position == 0

    def test_the_example(self) -> None:
        class InPlace(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input.mul_(2))

        x = X.clone()
        probe(InPlace(16, 4), x)
        assert torch.equal(x, X)


class TestRuns:
    def test_without_memory_or_time_for_weights(self) -> None:
        with torch.device("meta"):
            model = Model(width=1 << 16)
        assert len(reader(probe(model, torch.empty(1, 4, 1 << 16)), "head").keepers) == 1

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_where_gradients_are_off(self, context: Callable[[], object]) -> None:
        with context():  # type: ignore[attr-defined]
            assert reader(probe(Model(), X), "head").keepers == ["head"]

    def test_decisions_on_ids_are_real_ones_and_on_weights_made_up(self) -> None:
        class Picky(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 4)

            def forward(self, ids: Tensor) -> Tensor:
                assert ids.max().item() == 7
                mask = torch.zeros(8, device=self.embed.weight.device).bool()
                assert not mask.any()
                x = self.embed(ids)
                rows = x[x.sum(-1) > 0]  # as if all
                assert rows.shape == (3, 4)
                return self.head(x) if x.mean().item() else x

        assert reader(probe(Picky(), torch.tensor([1, 7, 2])), "head").maker == "embed"

    def test_layers_that_training_drops_at_random(self) -> None:
        class Dropping(Model):
            def forward(self, x: Tensor) -> Tensor:
                return x if torch.rand([]) < 0.99 else super().forward(x)

        assert probe(Dropping(), X)

    def test_arguments_in_order_and_by_name(self) -> None:
        class Two(Model):
            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return super().forward(x + y)

        assert probe(Two(), (X, X))
        assert probe(Two(), {"x": X, "y": X})

    def test_a_wrapper_runs_the_models_in_it(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        wrapped = nn.ModuleDict({"inner": transformers.LlamaForCausalLM(config)})
        found = reader(probe(wrapped), "inner.model.layers.0.self_attn.q_proj")
        assert found.maker == "inner.model.layers.0.input_layernorm"
        wrapped["inner"].model.layers[0].self_attn.o_proj = nn.Linear(3, 3)
        with pytest.raises(RuntimeError, match=r"3, 3|3x3"):
            probe(wrapped)

    def test_parts_run_where_the_whole_cannot(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {
            "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2,
        }  # fmt: skip
        config = transformers.CLIPConfig(
            text_config=sizes | {"vocab_size": 9, "eos_token_id": 2, "bos_token_id": 1},
            vision_config=sizes | {"image_size": 8, "patch_size": 4},
        )
        model = transformers.CLIPModel(config)  # says that it takes ids; takes pixels as well
        found = probe(model)
        for part in ("text_model", "vision_model"):
            layer = f"{part}.encoder.layers.0.self_attn.q_proj"
            assert reader(found, layer).maker == f"{part}.encoder.layers.0.layer_norm1"
        assert len(pamm.convert(model).converted) == 2

    def test_not_without_an_example(self) -> None:
        with pytest.raises(pamm.PammError, match="give convert an example"):
            probe(Model())


class Fed(nn.Module):
    """A linear layer fed by a module."""

    def __init__(self, maker: nn.Module) -> None:
        super().__init__()
        self.maker, self.q_proj = maker, nn.Linear(4, 4)

    def forward(self, h: Tensor) -> Tensor:
        return self.q_proj(self.maker(h))


class Scale(nn.Module):
    def forward(self, h: Tensor, by: float = 2) -> Tensor:
        return h * by


@pytest.mark.parametrize(
    ("maker", "obstacle"),
    [
        (nn.LayerNorm(4), None),
        (nn.RMSNorm(4), None),
        (nn.Sequential(nn.GELU(), nn.LayerNorm(4)), None),
        (nn.Dropout(0.1), "draws random numbers"),
        (nn.BatchNorm1d(4), "changes its buffers"),
        (nn.Sequential(nn.Linear(4, 4), Scale()), None),  # Scale is what makes it
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_be_made_again(maker: nn.Module, obstacle: str | None) -> None:
    assert reader(probe(Fed(maker), torch.randn(8, 4)), "q_proj").obstacle == obstacle


def test_a_product_of_matrices_is_not_made_again() -> None:
    found = reader(probe(Fed(nn.Linear(4, 4)), torch.randn(8, 4)), "q_proj")
    assert (found.maker, found.obstacle) == ("maker", "multiplies matrices")


def test_a_maker_of_several_arguments_is_not_run_again() -> None:
    class Model(Fed):
        def forward(self, h: Tensor) -> Tensor:
            return self.q_proj(self.maker(h, by=3))

    found = reader(probe(Model(Scale()), torch.randn(8, 4)), "q_proj")
    assert found.obstacle == "does not take one tensor"


def test_an_output_that_is_written_to_is_not_made_again() -> None:
    class Model(Fed):
        def forward(self, h: Tensor) -> Tensor:
            return self.q_proj(self.maker(h).mul_(2))

    found = reader(probe(Model(nn.LayerNorm(4)), torch.randn(8, 4)), "q_proj")
    assert found.obstacle == "returns what is written to afterwards"


def test_only_the_last_output_can_be_made_again() -> None:
    class Model(Fed):
        def forward(self, h: Tensor) -> Tensor:
            first, second = self.maker(h), self.maker(2 * h)
            return self.q_proj(first) + second

    found = reader(probe(Model(nn.LayerNorm(4)), torch.randn(8, 4)), "q_proj")
    assert found.obstacle == "runs again before its output is read"


def test_deepcopied_modules_are_not_shared_with_the_model() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    probe(model, X)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_nothing_of_the_run_stays_alive() -> None:
    alive: list[weakref.ref[object]] = []

    class Watched(Model):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x).sigmoid()  # which is saved in the graph that made it
            alive.extend((weakref.ref(self), weakref.ref(output)))
            return output

    probe(Watched(), X)
    gc.collect()
    assert [each() for each in alive] == [None, None]
