"""Arguments of a call of a module by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["arguments_by_name", "passes_on"]


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
