"""Frameworks that compute projections without calling the layers, so that PAMM would do nothing.

Told by names and attributes: none of these frameworks is imported.
"""

from collections.abc import Iterable, Iterator

import torch.nn.functional as F
from torch import nn

from pamm.errors import PammError


def refuse_bypasses(model: nn.Module) -> None:
    """Raise if q, k and v of ``model`` are computed around the layers, or not as layers do.

    Raises:
        PammError: says which framework does it, how it was recognised and what to do.
    """
    for reason in _bypasses(model):
        raise PammError(reason)


def fused(model: nn.Module, layers: Iterable[str]) -> str | None:
    """Why these layers are never called: a module above them has a fused forward. Or None."""
    for layer in layers:
        parts = layer.split(".")
        for length in range(len(parts)):
            above = ".".join(parts[:length])
            where = _forward_of(model.get_submodule(above))
            if where.startswith("axolotl.kernels"):
                return (
                    f"{above or 'the model'} computes them in a fused function ({where}), which "
                    "keeps X itself; set lora_mlp_kernel: false"
                )
    return None


def checkpointing(model: nn.Module) -> str | None:
    """What activation checkpointing does to PAMM, if ``model`` says that it is on."""
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return None
    return (
        "activation checkpointing is on: checkpointed blocks keep no X until backward, so PAMM "
        "frees next to nothing in them and compresses twice. Turn it off if memory allows."
    )


def _forward_of(module: nn.Module) -> str:
    """The Python module that defines what runs when ``module`` is called."""
    return getattr(getattr(module, "forward", None), "__module__", None) or ""


def _bypasses(model: nn.Module) -> Iterator[str]:
    if getattr(F.linear, "__module__", "").startswith("deepspeed"):
        yield (
            "DeepSpeed ZeRO-3 has put a function of its own in place of F.linear, which keeps X. "
            "Use ZeRO stage 1 or 2, or FSDP2."
        )
    for name, module in model.named_modules():
        # With any of its kernels Axolotl adds an apply_qkv; this one calls the layers.
        if getattr(getattr(module, "apply_qkv", None), "__name__", "") == "original_apply_qkv":
            pass
        elif hasattr(module, "apply_qkv"):
            yield (
                f"{name} has an apply_qkv: Unsloth, or Axolotl's lora_qkv_kernel, computes q, k "
                "and v in a fused function that reads the weights and keeps X itself; the layers "
                "are never called. Train without it (Axolotl: lora_qkv_kernel: false)."
            )
        where = _forward_of(module)
        if where.partition(".")[0] in ("unsloth", "unsloth_zoo"):
            yield (
                f"the forward of {name or 'the model'} is Unsloth's ({where}), whose fused "
                "functions keep X themselves. Load the model with Transformers instead."
            )
        if any(hasattr(p, "ds_id") for p in module.parameters(recurse=False)):
            yield (
                f"the weights of {name or 'the model'} are partitioned by DeepSpeed ZeRO-3, whose "
                "own linear function keeps X. Use ZeRO stage 1 or 2, or FSDP2."
            )
