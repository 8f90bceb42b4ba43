"""A model of Transformers on the ``meta`` device, from its configuration: no weights are loaded."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from pamm.analysis.dry_run import Compressed, DryRun, dry_run
from pamm.analysis.like_cuda import LikeCuda
from pamm.errors import PammError, said


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtype of weights, and the one that autocast computes in."""

    weights: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def compute(self) -> torch.dtype:
        """The dtype that q, k and v are computed in."""
        return self.autocast or self.weights


PRECISIONS = {
    "bf16": Precision(torch.bfloat16),
    "bf16-amp": Precision(torch.float32, torch.bfloat16),
    "fp16-amp": Precision(torch.float32, torch.float16),
    "fp32": Precision(torch.float32),
}
"""By the name on the command line; amp is autocast over fp32 weights, a Trainer's ``bf16=True``."""


def precision(name: str) -> Precision:
    """The precision of this name.

    Raises:
        PammError: if there is none.
    """
    if name not in PRECISIONS:
        raise PammError(f"dtype is {name!r}; choose one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


@dataclasses.dataclass(frozen=True)
class Source:
    """A configuration that models are built from, as often as needed."""

    name: str
    config: Any
    kind: Any
    """The class of the model."""

    @classmethod
    def load(cls, name: str) -> "Source":
        """Read the configuration of a model: a name on the hub, a folder or a file.

        Raises:
            PammError: if it cannot be read, or needs code from outside, which is not run.
        """
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()
            raise PammError(
                f"cannot read a model's configuration from {name!r}: "
                f"{reason[0] if reason else type(error).__name__} Give a name on the hub, a folder "
                "with a config.json, or such a file."
            ) from error
        except StrictDataclassError as error:
            raise PammError(
                f"the configuration {name!r} is not one of a model ({said(error)}). Correct it."
            ) from error
        names = [each for each in config.architectures or () if hasattr(transformers, each)]
        if names:
            return cls(name, config, getattr(transformers, names[0]))
        known = type(config) in AutoModelForCausalLM._model_mapping
        return cls(name, config, AutoModelForCausalLM if known else AutoModel)

    def build(self, dtype: torch.dtype, device: torch.device | str = "meta") -> nn.Module:
        """The model in training mode, without weights; with random ones on another device.

        Raises:
            PammError: if the configuration does not make a model.
        """
        config = type(self.config).from_dict(self.config.to_dict())
        for part in (config, config.get_text_config()):
            part.use_cache = False
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0
        make = getattr(self.kind, "from_config", self.kind)
        try:
            with torch.device(device):
                model = make(config)
        except Exception as error:  # of the model's own code
            raise PammError(
                f"cannot build a model from the configuration {self.name!r} "
                f"({type(error).__name__}: {said(error)}). "
                "Correct the configuration."
            ) from error
        if getattr(model.config, "_attn_implementation", None) not in ("eager", "sdpa"):
            model.set_attn_implementation("sdpa")
        return model.to(dtype).train()


def checkpoint(model: nn.Module, how: Precision, simulated: bool = True) -> bool:
    """Turn on full activation checkpointing; False if the model does not know it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return False
    # Backward, where layers run again, is outside of all modes that forward was in.
    contexts = lambda: (contextlib.nullcontext(), LikeCuda(how.autocast))  # noqa: E731
    settings: dict[str, Any] = {"use_reentrant": False}
    if simulated:
        settings["context_fn"] = contexts
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(settings)  # type: ignore[operator]
    return True


def step(
    model: nn.Module,
    how: Precision,
    batch: int,
    seq: int,
    compressed: Iterable[Compressed] = (),
) -> DryRun:
    """A dry run of one training step on ``batch`` sequences of ``seq`` tokens, or on images.

    Raises:
        PammError: if the model takes something else, or its code cannot run without values.
    """
    loss = _loss(model, how, batch, seq)
    try:
        return dry_run(model, loss, how.autocast, compressed)
    except Exception as error:
        raise PammError(
            f"{type(model).__name__} could not run without weights ({type(error).__name__}: "
            f"{said(error)}). Measure it on the real model instead: "
            "pamm.analysis.memory.saved_bytes."
        ) from error


def _loss(model: nn.Module, how: Precision, batch: int, seq: int) -> Callable[[], Tensor]:
    """One forward pass of ``model``, with the labels that its kind takes."""
    main, config = getattr(model, "main_input_name", None), cast(Any, model.config)
    kind = type(model).__name__
    if main == "input_ids":
        inputs = {main: torch.ones(batch, seq, dtype=torch.long)}
    elif main == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (batch, getattr(config, "num_channels", 3), height, width)
        inputs = {main: torch.empty(shape, dtype=how.weights, device="meta")}
    else:
        raise PammError(f"{kind} takes {main!r}; only text (input_ids) and images are known here.")
    if "labels" in inspect.signature(model.forward).parameters:
        for_each = ("SequenceClassification", "ImageClassification")
        labels = torch.zeros(batch, dtype=torch.long)
        if not kind.endswith(for_each):
            labels = torch.zeros(batch, seq, dtype=torch.long)
        inputs["labels"] = labels

    def loss() -> Tensor:
        output = model(**inputs)
        made = getattr(output, "loss", None)
        return output[0].sum() if made is None else made

    return loss
