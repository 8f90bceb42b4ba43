"""Bytes that the inputs of a run's converted layers hold, measured on one block of its model."""

import torch
from transformers import LlamaForCausalLM

import pamm
from pamm.analysis.memory import saved_bytes
from pamm.recipes.pretraining.model import llama_config
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import Tokens
from pamm.recipes.settings import Arm
from pamm.recompute import group_layers
from pamm.report import Report


def held_bytes(
    config: PretrainConfig, arm: Arm, tokens: Tokens, device: torch.device, bf16: bool
) -> tuple[int, Report]:
    """Bytes that all groups keep in one forward pass on one device, and what was converted.

    Measured on one block, times the number of blocks, which are all alike: so it is the same for
    weights that several processes share. Without activation checkpointing.
    """
    made = llama_config(config, tokens)
    blocks = made.num_hidden_layers
    with torch.device("meta"):
        report = pamm.convert(LlamaForCausalLM(made), arm.config, targets=arm.targets)
    made.num_hidden_layers = 1
    with torch.device(device):
        model = LlamaForCausalLM(made)
    pamm.convert(model, arm.config, targets=arm.targets)
    layers = group_layers(model)
    if arm.is_exact:
        pamm.revert(model)
    ids = torch.zeros(config.batch_size, config.sequence_length, dtype=torch.int64, device=device)
    model.train()
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        held = saved_bytes(model, layers, lambda: model(input_ids=ids, labels=ids))
    if bf16:  # layers compute in it, whatever their weights are kept in
        report = report.computing_in(torch.bfloat16)
    return blocks * sum(held.values()), report
