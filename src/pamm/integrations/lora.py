"""PEFT: puts LoRA on layers, to see what it would keep."""

import warnings
from collections.abc import Iterable

from torch import nn

from pamm.extras import require


def add_lora(model: nn.Module, layers: Iterable[str], fp32: bool) -> None:
    """Freeze ``model`` and put LoRA of rank 16, without dropout, on ``layers``, in place.

    Args:
        model: of Transformers, of any device.
        layers: full names.
        fp32: keep adapters in fp32, as PEFT does by default; else in the dtype of the weights.

    Raises:
        PammError: if PEFT is not installed.
    """
    require("peft", "peft")
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Conv1D has its weight the other way round
        inject_adapter_in_model(LoraConfig(r=16, target_modules=list(layers)), model)
    cast_adapter_dtype(model, "default", autocast_adapter_dtype=fp32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
