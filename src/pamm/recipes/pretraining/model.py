"""The model of a run: LLaMA's architecture, from Transformers."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.utils.import_utils import is_flash_attn_2_available

from pamm.config import check_keys
from pamm.errors import PammError, said
from pamm.recipes.pretraining.settings import PretrainConfig
from pamm.recipes.pretraining.tokens import Tokens

# Keys of model files that say nothing about the architecture, or that the recipe decides.
_IGNORED = {
    *("architectures", "model_type", "_name_or_path", "transformers_version", "use_cache"),
    *("dtype", "torch_dtype", "max_sequence_length"),
}


def llama_config(config: PretrainConfig, tokens: Tokens) -> LlamaConfig:
    """The model's configuration; what it leaves open follows from the tokens.

    Raises:
        PammError: if a key or a value is not LLaMA's, the vocabulary is too small, or attention
            cannot be computed as asked.
    """
    if config.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise PammError(
            "attention is 'flash_attention_2', but flash-attn is not installed here, or there is "
            "no GPU for it. Install it (pip install flash-attn), or choose sdpa."
        )
    assert isinstance(config.model, dict)
    values: dict[str, Any] = dict(config.model)
    if (kind := values.get("model_type", "llama")) != "llama":
        raise PammError(f"model is of type {kind!r}; this recipe trains LLaMA models ('llama').")
    known = [name for name in LlamaConfig.__dataclass_fields__ if name not in _IGNORED]
    check_keys(values, [*known, *sorted(_IGNORED)], "model (a LlamaConfig)")
    values = {key: value for key, value in values.items() if key not in _IGNORED}
    values = {
        "vocab_size": tokens.vocabulary,
        "max_position_embeddings": config.sequence_length,
        "bos_token_id": tokens.end_of_text,
        "eos_token_id": tokens.end_of_text,
    } | values
    for key, least in (
        ("vocab_size", tokens.vocabulary),
        ("max_position_embeddings", config.sequence_length),
    ):
        if not isinstance(values[key], int) or values[key] < least:
            raise PammError(
                f"{key} of the model is {values[key]!r}; this run needs {least} or more. Leave it "
                "out to take that."
            )
    try:
        made = LlamaConfig(**values)
        with torch.device("meta"):  # shapes only: finds sizes that do not fit, and costs nothing
            LlamaForCausalLM(made)(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    except Exception as error:  # of many kinds, by which value is wrong
        raise PammError(f"model is no LLaMA that can be built: {said(error)}.") from error
    return made


def build(config: PretrainConfig, tokens: Tokens) -> LlamaForCausalLM:
    """The model with its first weights, which are the same for every arm."""
    made = llama_config(config, tokens)
    made._attn_implementation = config.attention
    set_seed(config.seed)
    return LlamaForCausalLM(made)


def compile_blocks(model: Any) -> None:
    """Compile the blocks of a causal model one by one, which are all alike, and its loss.

    As a whole it would take the compiler as many times as long as it has blocks.
    """
    # DDP sends a block's gradients while the next ones are computed: no need to cut blocks up.
    torch._dynamo.config.optimize_ddp = False
    for block in model.model.layers:
        block.compile(dynamic=False)
    model.loss_function = torch.compile(model.loss_function, dynamic=False)
