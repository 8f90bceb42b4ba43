"""The model of a fine-tuning and its processor: from the hub, a folder, or a new small Pixtral."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MistralConfig,
    PixtralImageProcessorPil,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
)

import pamm
from pamm.config import check_keys, whole_number
from pamm.errors import PammError, said
from pamm.extras import require
from pamm.recipes.finetuning.vlm.questions import question
from pamm.recipes.finetuning.vlm.settings import VlmConfig

PARTS = ("vision_config", "text_config")
PROJECTIONS = ["q_proj", "k_proj", "v_proj"]
_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>", "<image>")


def load(
    config: VlmConfig,
    classes: tuple[str, ...],
    bf16: bool,
    checkpoint: Path | None = None,
    device: str | None = None,
) -> tuple[Any, nn.Module]:
    """Processor and model; new weights follow torch's seed.

    Weights that are trained are in fp32; under LoRA the frozen ones are in bf16 if ``bf16``.

    Args:
        config: the fine-tuning.
        classes: their names.
        bf16: whether it computes in bf16.
        checkpoint: of all weights, if they are trained and training goes on. The Trainer cannot
            load it: Transformers saves some models' weights under other names than the model's,
            and the Trainer passes over names that it does not know.
        device: of the weights; on ``meta`` there are none, though their files must be there.

    Raises:
        PammError: if there is no such model, or it does not answer questions about images.
    """
    dtype = torch.bfloat16 if config.lora is not None and bf16 else torch.float32
    resumed = checkpoint if config.lora is None else None
    model: Any
    if (values := config.from_scratch) is not None:
        processor, model = _new(values, classes)
        if resumed is not None:
            model = AutoModelForImageTextToText.from_pretrained(resumed, trust_remote_code=False)
        model.to(device, dtype)
    else:
        try:
            processor = AutoProcessor.from_pretrained(config.model, trust_remote_code=False)
            weights = resumed or config.model
            model = AutoModelForImageTextToText.from_pretrained(
                weights, dtype=dtype, device_map=device, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise PammError(
                f"cannot load {config.model} as a model that takes images and text: {said(error)}. "
                "Give such a model's name on the hub, its folder with a processor, or "
                "small-pixtral."
            ) from error
    model.config.get_text_config().use_cache = False  # in training; generation turns it on
    if config.lora is not None:
        model = _with_lora(model, config.lora)
    return processor, model


def _with_lora(model: nn.Module, lora: dict[str, Any]) -> nn.Module:
    require("peft", "peft")
    from peft import LoraConfig, get_peft_model

    try:
        made = LoraConfig(**{"target_modules": PROJECTIONS, **lora})
        return get_peft_model(model, made)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise PammError(f"lora is {lora}; PEFT says: {said(error)}.") from error


def _new(values: dict[str, Any], classes: tuple[str, ...]) -> tuple[Any, nn.Module]:
    """A Pixtral with random weights whose tokenizer knows the words of the question."""
    check_keys(values, list(PARTS), "the model's file")
    if missing := [part for part in PARTS if not isinstance(values.get(part), dict)]:
        raise PammError(f"the model's file lacks {' and '.join(missing)}. Add it.")
    side, patch = (values["vision_config"].get(key) for key in ("image_size", "patch_size"))
    for key, number in (("image_size", side), ("patch_size", patch)):
        whole_number(f"{key} of the vision_config", number, least=1)
    words = [word for word, _ in Whitespace().pre_tokenize_str(question(classes))]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys((*_SPECIAL, *words)))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    pad, unknown, begin, end, image = _SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        additional_special_tokens=[image],
    )
    try:
        vision = PixtralVisionConfig(**values["vision_config"])
        text = MistralConfig(
            vocab_size=len(vocabulary),
            pad_token_id=vocabulary[pad],
            bos_token_id=vocabulary[begin],
            eos_token_id=vocabulary[end],
            **values["text_config"],
        )
        model = LlavaForConditionalGeneration(
            LlavaConfig(
                vision_config=vision,
                text_config=text,
                image_token_index=vocabulary[image],
                vision_feature_layer=-1,
                vision_feature_select_strategy="full",
            )
        )
    except Exception as error:  # of many kinds, by which value is wrong
        raise PammError(
            f"the model's file is no Pixtral that can be built: {said(error)}."
        ) from error
    images = PixtralImageProcessorPil(
        size={"longest_edge": side}, patch_size={"height": patch, "width": patch}
    )
    # Pixtral's own processor needs torchvision, for which there is no reason.
    processor = LlavaProcessor(
        images, fast, patch_size=patch, vision_feature_select_strategy="full", image_token=image
    )
    return processor, model


def vision_tower(model: nn.Module) -> str:
    """Name of the module that sees images, within the model.

    Raises:
        PammError: if there is none.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    found = base.get_encoder(modality="image")  # the model itself where there is none
    if found is base or found is base.base_model:
        raise PammError(f"{type(base).__name__} has no vision tower that Transformers knows.")
    return next(name for name, module in model.named_modules() if module is found)


def select(tower: str, prefix: str) -> dict[str, Any]:
    """For ``pamm.convert``: the layers of the vision tower, named ``prefix``, or all others."""
    key = "include" if tower == "vision" else "exclude"
    return {key: f"{prefix}.*"}


def convert_towers(
    model: nn.Module, towers: dict[str, pamm.PammConfig], example: dict[str, torch.Tensor]
) -> pamm.Report:
    """Convert the language model and the vision tower, each in its own way; one report of both.

    A tower with method ``"exact"`` stays as it is, unless all are.
    """
    prefix = vision_tower(model)
    exact = [name for name, config in towers.items() if config.method == "exact"]
    reports = [
        pamm.convert(model, config, example=example, **select(name, prefix))
        for name, config in towers.items()
        if name not in exact or len(exact) == len(towers)
    ]
    converted = tuple(group for report in reports for group in report.converted)
    return pamm.Report(reports[0].config, converted, reports[-1].skipped, reports[-1].problem)
