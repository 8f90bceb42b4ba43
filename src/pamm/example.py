"""Inputs for one forward pass of a model that says what it takes, as those of Transformers do."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Example = Tensor | Sequence[Any] | Mapping[str, Any]
"""Arguments of a model's forward: one tensor, several in order, or by name."""

TOKENS = 16
IMAGE, SOUND = 224, 16_000


def example_of(model: nn.Module) -> dict[str, Tensor] | None:
    """Small inputs by the model's own ``main_input_name`` and ``config``; None if it has none.

    Ids have values; images and sounds have none, whatever their size, and the weights' dtype.
    """
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    makers = {
        "input_ids": _ids,
        "decoder_input_ids": _ids,
        "pixel_values": _image,
        "input_values": _sound,
        "input_features": _spectrum,
    }
    if config is None or name not in makers:
        return None
    made = makers[name](config)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), made.dtype)
    inputs = {name: made.to(dtype) if made.is_floating_point() else made}
    if getattr(config, "is_encoder_decoder", False):
        takes = inspect.signature(model.forward).parameters
        if "decoder_input_ids" in takes:
            inputs["decoder_input_ids"] = _ids(config)
    return inputs


def _ids(config: Any) -> Tensor:
    """One word again and again, and the end: no id that would stand for an image or for padding."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    known = {**vars(config), **vars(text)}
    special = {value for name, value in known.items() if "token" in name or "index" in name
               if isinstance(value, int)}  # fmt: skip
    size = known.get("vocab_size") or 1
    word = next((number for number in range(3, size) if number not in special), 0)
    ids = torch.full((1, TOKENS), word)
    end = known.get("eos_token_id")
    if isinstance(end, int) and 0 <= end < size:
        ids[0, -1] = end
    return ids


def _image(config: Any) -> Tensor:
    config = getattr(config, "vision_config", None) or config
    channels = _first(config, 3, "num_channels", "in_channels", "in_chans")
    size = _first(config, IMAGE, "image_size", "img_size")
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    frames = (config.num_frames,) if isinstance(getattr(config, "num_frames", None), int) else ()
    return torch.empty(2, *frames, channels, height, width, device="meta")


def _sound(config: Any) -> Tensor:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return torch.empty(1, config.max_length, config.num_mel_bins, device="meta")
    return torch.empty(1, SOUND, device="meta")


def _spectrum(config: Any) -> Tensor:
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return torch.empty(1, config.num_mel_bins, 2 * config.max_source_positions, device="meta")
    bins = _first(config, 80, "feature_projection_input_dim", "num_mel_bins", "input_feat_size")
    return torch.empty(1, 8 * TOKENS, bins, device="meta")


def _first(config: Any, default: Any, *names: str) -> Any:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), default)
