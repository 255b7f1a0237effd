"""What a checkpoint holds of a monitor: tensors by name, the facts among them as the bytes of a JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pca_torch._safetensors import as_bytes, decode, encode
from pca_torch._state import Saved

__all__ = ["pack", "unpack"]

FACTS = "facts"


def pack(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Both as tensors alone, which any checkpoint takes: safetensors, or `torch.load(weights_only=True)`.

    Args:
        tensors: by name; they are copied to the CPU, since training goes on with them.
        facts: JSON types, and floats that are not finite.
    """
    text = bytearray(json.dumps(encode(dict(facts), "state"), allow_nan=False).encode())
    copied = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return {**copied, FACTS: torch.frombuffer(text, dtype=torch.uint8).clone()}


def unpack(state: Mapping[str, Tensor]) -> Saved:
    """What `pack` was given.

    Args:
        state: its result, perhaps after a way through a file.

    Raises:
        ValueError: it is not that.
    """
    allowed = "`state` must be what `state_dict` of a monitor gave, tensors by name"
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{allowed}, got {type(state).__name__}.")
    if FACTS not in state or state[FACTS].dtype != torch.uint8 or state[FACTS].ndim != 1:
        raise ValueError(f"{allowed}, got some without its facts.")
    try:
        facts = decode(bytes(as_bytes(state[FACTS])).decode())
    except ValueError as error:  # bytes that are no text too
        raise ValueError(f"`state` is damaged: its facts cannot be read ({error}).") from None
    return {name: tensor for name, tensor in state.items() if name != FACTS}, facts
