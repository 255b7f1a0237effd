"""Arguments of a call of a module by name, and what its cache and its mask say of the past."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["arguments_by_name", "cached", "padding_of", "passes_on"]

ALL_TOKENS = "full_attention"  # the kind of layer that attends to the whole past
CACHES = ("cache", "past_key_values")  # the argument in transformers from 5.24 on, and before


def arguments_by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Arguments of a forward by name, in its order, and whether some have none; these go by "0", "1", ….

    Args:
        module: what is called.
        args: by position.
        kwargs: by keyword.
    """
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:  # not what the forward takes, as it will say itself
        return dict(kwargs), False
    arguments: dict[str, Any] = {}
    nameless = False
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            nameless = len(value) > 0
            arguments |= {str(place): item for place, item in enumerate(value)}
        else:
            arguments |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return arguments, nameless


def passes_on(module: nn.Module) -> bool:
    """Whether a forward takes arguments without names for them, as one does that hands them to another.

    Args:
        module: what is called.
    """
    kinds = {parameter.kind for parameter in inspect.signature(module.forward).parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds or kinds == {inspect.Parameter.VAR_KEYWORD}


def padding_of(mask: Any, arguments: Mapping[str, Any]) -> Any:
    """The mask (B, past + T) behind one of four axes that `generate` makes for a cache of fixed size.

    There (B, 1, T, S) says which of the S places of the cache each token attends to: a token attends to
    itself unless it is padding, and the first one to all that came before and is none. Masks of four axes
    beside another cache stay as they are: some let padding attend to itself.

    Args:
        mask: the argument of the forward.
        arguments: of the forward, the cache among them.
    """
    fixed = any(getattr(arguments.get(name), "is_compileable", False) for name in CACHES)
    if isinstance(mask, Mapping):  # one for each kind of layer
        mask = mask.get(ALL_TOKENS, mask)
    if not fixed or not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1] != 1:
        return mask
    past, steps = int(cached(arguments)), mask.shape[2]
    if past + steps > mask.shape[3]:
        return mask
    attends = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]  # floats are added to the scores
    own = attends[:, :, past : past + steps].diagonal(dim1=1, dim2=2)
    return torch.cat([attends[:, 0, :past], own], 1)


def cached(arguments: Mapping[str, Any]) -> Any:
    """How many tokens the cache of a forward holds.

    Args:
        arguments: of the forward.
    """
    lengths = (getattr(arguments.get(name), "get_seq_length", None) for name in CACHES)
    return next((length() for length in lengths if length is not None), 0)
