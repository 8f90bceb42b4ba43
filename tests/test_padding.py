"""Generators are drawn among tokens that are no padding."""

import copy
import pickle

import pytest
import torch
from torch import nn

import pamm
from pamm.errors import PammError
from pamm.nn import groups
from pamm.padding import skip_padding
from pamm.stream import Stream

CPU = torch.device("cpu")


class Block(nn.Module):
    """q, k and v of one X; its loss reads no row of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        out = self.query(x) + self.key(x) + self.value(x)
        return out if attention_mask is None else out * attention_mask[..., None]


class Normed(nn.Module):
    """The norm can make X again, as the method ``sampled`` wants."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(8), Block()

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.block(self.norm(x), attention_mask)


def test_no_row_of_padding_is_drawn_and_the_others_alike() -> None:
    stream = Stream(seed=3)
    stream.valid = torch.arange(40) % 4 == 0  # 10 rows
    counts = torch.zeros(40)
    for _ in range(2000):
        rows = stream.draw(40, 3, CPU)
        assert len(rows.unique()) == 3
        counts[rows] += 1
    assert counts[~stream.valid].sum() == 0
    # 600 of each are expected, with a standard deviation of 20.5: 5 of these.
    assert (counts[stream.valid] - 600).abs().max() < 103


def test_padding_is_drawn_where_there_is_nothing_else() -> None:
    stream = Stream()
    stream.valid = torch.arange(10) < 2
    assert {0, 1} <= set(stream.draw(10, 5, CPU).tolist())


def test_without_padding_the_rows_are_those_of_a_model_that_knows_no_mask() -> None:
    plain, masked = Stream(seed=5), Stream(seed=5)
    masked.valid = torch.ones(64, dtype=torch.bool)
    for _ in range(3):
        assert torch.equal(plain.draw(64, 7, CPU), masked.draw(64, 7, CPU))
    assert torch.equal(masked.draw_again(64, 7, CPU), plain.draw_again(64, 7, CPU))


def test_a_mask_of_other_tokens_is_not_used() -> None:
    plain, masked = Stream(seed=5), Stream(seed=5)
    masked.valid = torch.arange(32) < 1
    assert torch.equal(plain.draw(64, 7, CPU), masked.draw(64, 7, CPU))


def test_one_generator_is_never_lost_to_padding() -> None:
    model = Block()
    pamm.convert(model, pamm.PammConfig("pamm", "1/128"))
    x = torch.randn(4, 16, 8)
    mask = (torch.arange(16) < 2).long().expand(4, 16)  # 7 of 8 rows are padding
    x[:, 2:] = 0  # a generator that is zero stands for nothing: the gradient is lost

    def lost(steps: int = 50) -> int:
        count = 0
        for _ in range(steps):
            model.zero_grad()
            model(x, attention_mask=mask).square().sum().backward()
            count += int(model.query.weight.grad.abs().sum() == 0)  # type: ignore[union-attr]
        return count

    assert lost() > 30
    stop = skip_padding(model)
    assert lost() == 0
    stop()
    assert lost() > 30


def gradient(config: pamm.PammConfig, *, skips: bool) -> torch.Tensor:
    """Of the query, of 8 passes with 8 tokens, 4 of them no padding, and 8 features."""
    torch.manual_seed(0)
    x, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0]] * 2)
    model = Normed()
    pamm.convert(model, config, example=x)
    if skips:
        skip_padding(model)
    for _ in range(8):
        model(x, attention_mask=mask).square().sum().backward()
    assert model.block.query.weight.grad is not None
    return model.block.query.weight.grad


@pytest.mark.parametrize("tolerance", [None, 1.0])
def test_generators_for_every_row_are_drawn_by_the_mask(tolerance: float | None) -> None:
    config = pamm.PammConfig("pamm", 1 / 4, tolerance)
    assert not torch.equal(gradient(config, skips=True), gradient(config, skips=False))


@pytest.mark.parametrize(
    "config",
    [
        # These scale by all rows, so they must draw among all.
        pamm.PammConfig("uniform_crs", ratio=1 / 4),
        pamm.PammConfig("pamm", 1 / 4, tolerance=0.0),
        pamm.PammConfig("pamm", 1 / 4, tolerance=0.5),
        # These draw an offset, or features, here as many as there are tokens.
        pamm.PammConfig("sampled", ratio=1 / 4),
        pamm.PammConfig("subspace", ratio=1 / 4),
        pamm.PammConfig("compact", ratio=1 / 4),
        pamm.PammConfig("recompute"),
    ],
    ids=lambda config: f"{config.method}-{config.tolerance}",
)
def test_no_other_draw_is_changed(config: pamm.PammConfig) -> None:
    assert torch.equal(gradient(config, skips=True), gradient(config, skips=False))


@pytest.mark.parametrize(
    "config",
    [
        pamm.PammConfig("uniform_crs", ratio=1 / 4),
        pamm.PammConfig("pamm", 1 / 4, tolerance=0.0),
        pamm.PammConfig("sampled", ratio=1 / 4),
    ],
    ids=lambda config: config.method,
)
def test_the_mean_gradient_is_the_exact_one(config: pamm.PammConfig) -> None:
    model, exact = Normed(), Normed()
    exact.load_state_dict(model.state_dict())
    x, mask = torch.randn(4, 10, 8), (torch.arange(10) < 3).long().expand(4, 10)
    exact(x, attention_mask=mask).sum().backward()
    pamm.convert(model, config, example=x)
    skip_padding(model)
    draws = 500
    for _ in range(draws):
        (model(x, attention_mask=mask).sum() / draws).backward()
    mean, truth = model.block.query.weight.grad, exact.block.query.weight.grad
    assert mean is not None
    assert truth is not None
    # Drawing among 12 tokens and scaling by all 40 would give 3.3.
    assert float((mean * truth).sum() / truth.square().sum()) == pytest.approx(1, abs=0.2)


def test_a_pass_without_a_mask_forgets_the_last_one() -> None:
    model = Block()
    pamm.convert(model, pamm.PammConfig("pamm"))
    skip_padding(model)
    model(torch.randn(2, 4, 8), attention_mask=torch.ones(2, 4))
    assert groups(model)[0].stream.valid is not None
    model(torch.randn(2, 4, 8))
    assert groups(model)[0].stream.valid is None


def test_a_copy_and_a_pickle_skip_their_own_padding() -> None:
    model = Normed()
    pamm.convert(model, pamm.PammConfig("pamm", 1 / 4))
    skip_padding(model)
    x, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(x, attention_mask=mask)
        assert torch.equal(groups(copied)[0].stream.valid, mask.reshape(-1).bool())
        assert groups(model)[0].stream.valid is None


def test_a_model_that_is_not_converted_is_refused() -> None:
    with pytest.raises(PammError, match=r"call pamm\.convert"):
        skip_padding(Block())


def test_the_mask_of_an_encoder_is_not_the_decoders() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=32, d_model=16, max_position_embeddings=16,
        encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    pamm.convert(model, pamm.PammConfig("pamm", 1 / 4))
    skip_padding(model)
    ids = torch.randint(3, 32, (2, 8))  # as many tokens on either side
    model(input_ids=ids, attention_mask=(torch.arange(8) < 4).expand(2, 8), decoder_input_ids=ids)
    masked = {group.name: group.stream.valid is not None for group in groups(model)}
    assert len(masked) > 1
    assert masked == {name: ".encoder." in name for name in masked}
