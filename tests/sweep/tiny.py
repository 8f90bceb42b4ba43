"""Every model type of the installed Transformers, built as small as it allows."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from pamm.example import example_of

KINDS = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "sequence-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
"""Kind of task -> type of model -> name of its class."""

WIDTH = 64

SIZES: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim"), WIDTH),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "embedding_size"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "lstm_hidden_size", "d_embed", "width"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 2 * WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "dim_ff", "dff"), 2 * WIDTH),
    **dict.fromkeys(("hidden_dim", "moe_intermediate_size", "shared_intermediate_size"), 2 * WIDTH),
    # depths
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "n_head_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers",), 2),
    # heads
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "v_head_dim"), 16),
    # vocabulary and lengths
    "vocab_size": 256,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 16,
    "entity_vocab_size": 16,
    "max_position_embeddings": 128,
    "n_positions": 128,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    # images
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}
"""What is set where a configuration has it."""

MLA = {"num_key_value_heads": 4, "head_dim": 16, "qk_head_dim": 32, "v_head_dim": 16}
SWIN = {
    "embed_dim": 24,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "patch_size": 4,
    "window_size": 4,
}
CHANGES: dict[str, dict[str, Any]] = {
    "dots1": {"head_dim": 16},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": None},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "axk1": {"kv_lora_rank": 32, "head_dim": 16, "num_key_value_heads": 4},
    "cohere_compass_text": {"num_hidden_layers": 4},
    "kimi_linear": {"num_expert_group": 1, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {"num_hidden_layers": 3},
    "swin": SWIN,
    "swinv2": SWIN,
    "donut-swin": SWIN,
    "convnext": {"image_size": 64},
    "convnextv2": {"image_size": 64},
    "mobilevitv2": {"image_size": 64},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "bamba": {"attn_layer_indices": [1]},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lilt": {"hidden_size": 96},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
}
"""What single types need beyond that."""


def config_of(kind_of_config: type[Any], changes: dict[str, Any] | None = None) -> Any:
    """The default configuration with small sizes, also in its parts."""
    default = kind_of_config()
    known = {name: value for name, value in default.__dict__.items() if isinstance(name, str)}
    values = {
        name: size
        for name, size in SIZES.items()
        if name in known and not isinstance(known[name], list | tuple | dict)
    }
    if "qk_rope_head_dim" in known:
        values |= {name: size for name, size in MLA.items() if name in known}
    for name, value in known.items():
        # Ids beyond the small vocabulary.
        if name.endswith("token_id") and isinstance(value, int) and value >= SIZES["vocab_size"]:
            values[name] = 250 if name.startswith(("image", "video", "audio")) else 2
    if isinstance(kinds := known.get("layer_types"), list) and len(set(kinds)) > 1:
        values["layer_types"] = list(dict.fromkeys(kinds))  # one layer of each
        values["num_hidden_layers"] = len(values["layer_types"])
    for name in getattr(kind_of_config, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None:
            values[name] = config_of(type(part), CHANGES.get(part.model_type)).to_dict()
    values |= changes or {}
    return kind_of_config(**values)


def build(kind: str, model_type: str) -> nn.Module:
    """A small model with random weights, in training mode."""
    torch.manual_seed(0)
    names = KINDS[kind][model_type]  # of several, the first is the usual one
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    config = config_of(model_class.config_class, CHANGES.get(model_type))
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    return model_class(config).train()


def inputs_of(model: nn.Module) -> dict[str, Any]:
    """The inputs that the probe takes, with values."""
    inputs = example_of(model)
    if inputs is None:
        raise ValueError(f"no inputs for {type(model).__name__}")
    return {name: torch.randn(x.shape) if x.is_meta else x for name, x in inputs.items()}
