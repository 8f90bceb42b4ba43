"""Models of Transformers with something special: Conv1D, two towers, shared states."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import (
    ASTConfig,
    AutoModel,
    BeitConfig,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    HubertConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    SegformerConfig,
    Speech2TextConfig,
    SwinConfig,
    TrainerState,
    VideoMAEConfig,
    Wav2Vec2Config,
    WhisperConfig,
)

import pamm
from pamm.config import PammConfig
from pamm.integrations.transformers import PammCallback
from pamm.recompute import Recomputing
from pamm.surgery import survey
from tests.helpers import pamm_layers

IDS = torch.arange(40).reshape(2, 20)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    )


def gradients(model: nn.Module, autocast: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}  # type: ignore[union-attr]


class TestConv1D:
    """GPT-2's linear layer with the weight the other way round."""

    @pytest.mark.parametrize("autocast", [False, True])
    def test_everything_but_the_weights_is_exact(self, autocast: bool) -> None:
        model = gpt2()
        twin = copy.deepcopy(model)
        report = pamm.convert(twin, PammConfig("pamm", 1 / 8))
        assert [group.name for group in report.converted] == [
            f"transformer.h.{layer}.attn.c_attn" for layer in range(2)
        ]
        assert report.converted[0].in_features == 32
        assert report.converted[0].out_features == (96,)
        exact, ours = gradients(model, autocast), gradients(twin, autocast)
        for name, grad in exact.items():
            assert torch.equal(ours[name], grad) != name.endswith("c_attn.weight"), name
            assert ours[name].shape == grad.shape
            assert ours[name].is_contiguous()

    def test_with_every_row_kept_the_weights_are_too(self) -> None:
        model = gpt2()
        exact = gradients(model)
        pamm.convert(model, PammConfig("pamm", 1.0))
        for name, grad in gradients(model).items():
            assert torch.allclose(grad, exact[name], atol=1e-6), name

    def test_recomputing_is_exact(self) -> None:
        model = gpt2()
        exact = gradients(model)
        report = pamm.convert(model, PammConfig("recompute"), targets=("attention", "mlp"))
        assert len(report.converted) == 4
        assert sum(isinstance(module, Recomputing) for module in model.modules()) == 4
        assert all(torch.equal(grad, exact[name]) for name, grad in gradients(model).items())

    @pytest.mark.parametrize("method", ["pamm", "recompute"])
    def test_it_is_taken_back(self, method: str) -> None:
        model = gpt2()
        plain, names = repr(model), list(model.state_dict())
        pamm.convert(model, PammConfig(method))
        assert list(model.state_dict()) == names
        assert pamm.revert(model) == 2
        assert repr(model) == plain

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_are_converted_too(self, copied: object) -> None:
        model = gpt2()
        pamm.convert(model, PammConfig("pamm", 1 / 8))
        twin = copied(model)  # type: ignore[operator]
        assert [layer.pamm_group.name for layer in pamm_layers(twin)] == [
            "transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"
        ]  # fmt: skip
        ours, theirs = gradients(model), gradients(twin)
        assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())
        assert "group=transformer.h.0.attn.c_attn" in repr(twin)


def test_two_towers_with_settings_of_their_own() -> None:
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                image_size=32, patch_size=8,
            ),
            text_config=LlamaConfig(
                hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                vocab_size=128,
            ),
            image_token_index=100,
        )
    )  # fmt: skip
    text = pamm.convert(model, PammConfig("pamm", 1 / 8), exclude="*vision_tower*")
    vision = pamm.convert(model, PammConfig("pamm", 1 / 2), include="*vision_tower*")
    for report in (text, vision):
        assert report.problem is None
        # The vision tower is not run by ids alone; it is run by itself.
        assert [group.confirmed for group in report.converted] == [True, True]
    assert all("vision_tower" in group.name for group in vision.converted)


def test_the_callback_takes_recomputing_as_well() -> None:
    model, callback = gpt2(), PammCallback(PammConfig("recompute"))
    state = TrainerState()
    for _ in range(2):  # the second time it is converted already
        callback.on_init_end(None, state, None, model=model)  # type: ignore[arg-type]
        callback.on_step_begin(None, state, None, model=model)  # type: ignore[arg-type]
    assert callback.report is not None
    assert len(callback.report.converted) == 2


WIDTHS = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WAVES = WIDTHS | {
    "conv_dim": (8, 8),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
SPEECH = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
HEARING_AND_SEEING = [
    WhisperConfig(**SPEECH),
    Speech2TextConfig(**SPEECH),
    Wav2Vec2Config(**WAVES),
    HubertConfig(**WAVES),
    ASTConfig(**WIDTHS),
    VideoMAEConfig(image_size=32, **WIDTHS),
    BeitConfig(image_size=32, **WIDTHS),
    SegformerConfig(hidden_sizes=[8] * 4, depths=[1] * 4, decoder_hidden_size=8),
    SwinConfig(image_size=32, embed_dim=8, depths=[1], num_heads=[2], window_size=4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", HEARING_AND_SEEING, ids=lambda config: config.model_type)
def test_sounds_and_images_confirm_groups_in_every_dtype(
    config: PretrainedConfig, dtype: torch.dtype
) -> None:
    report = survey(AutoModel.from_config(config).to(dtype), pamm.PammConfig("pamm"))
    assert report.problem is None
    assert any(group.confirmed for group in report.converted)
