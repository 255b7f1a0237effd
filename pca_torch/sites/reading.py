"""Reading activations (..., D) out of what a module was given or returned: rows, maps, heads, parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pca_torch.sites.site import Arguments, Read
from pca_torch.sites.tree import bare, spatial_axes, width_in, width_out

__all__ = ["argument", "as_map", "as_rows", "by_layout", "per_head", "result", "tensors"]

MAIN_ARGUMENTS = ("hidden_states", "input", "inputs", "x")  # of keyword calls, before masks and tables


def result(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
    """The first floating tensor that the module returned.

    Raises:
        ValueError: there is none, or it has no axis of features beside one of samples.
    """
    return _floating(output, "the output")


def argument(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
    """The first floating tensor that the module was given, by position or by keyword.

    Raises:
        ValueError: there is none, or it has no axis of features beside one of samples.
    """
    named = [kwargs[name] for name in MAIN_ARGUMENTS if name in kwargs]
    return _floating((*args, *named, *kwargs.values()), "the input")


def by_layout(take: Read) -> Read:
    """Rows where features are the last axis, positions of a map where channels come before them."""
    inward = take is argument

    def read(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
        x = take(module, args, kwargs, output)
        axes = _spatial_axes(module, x, inward)
        if axes is None:
            side = "input" if inward else "output"
            rows, positions = ("input_rows", "input_map") if inward else ("rows", "map")
            raise ValueError(
                f"the {side} of {type(module).__name__} has shape {tuple(x.shape)}, which can be a map "
                f"(B, C, ...) or end in its features; name the point ':{positions}' or ':{rows}'."
            )
        return _positions(x, axes) if axes else _tokens_first(x, args, kwargs)

    return read


def as_rows(take: Read) -> Read:
    """The last axis holds the features, whatever the module is."""

    def read(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
        return _tokens_first(take(module, args, kwargs, output), args, kwargs)

    return read


def as_map(take: Read) -> Read:
    """(B, C, ...) as positions of C features each, (B, positions, C)."""

    def read(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
        x = take(module, args, kwargs, output)
        return _positions(x, spatial_axes(module) or x.ndim - 2)

    return read


def per_head(take: Read, heads: int, width: int) -> Read:
    """Heads side by side (..., H·E), from a tensor that may hold them on an axis of their own.

    Args:
        take: what gives (..., H·E), (B, T, H, E) or (B, H, T, E).
        heads: H.
        width: E.
    """

    def read(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
        x = take(module, args, kwargs, output)
        alone = heads == 1 and x.ndim >= 4 and 1 in x.shape[-3:-1]  # one head, on an axis of its own
        if x.shape[-1] == heads * width and not alone:
            return x
        if x.shape[-1] != width or heads not in x.shape[-3:-1]:
            raise ValueError(f"{heads} heads of width {width} were expected, got shape {tuple(x.shape)}.")
        if x.ndim >= 4 and _heads_first(x, argument(module, args, kwargs, output), heads):
            x = x.transpose(-2, -3)
        return x.flatten(-2)

    return read


def tensors(value: object, depth: int = 2) -> Iterator[Tensor]:
    """Tensors in `value`, at most `depth` containers deep, in their order.

    Yields:
        each tensor.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item, depth - 1)


def _heads_first(x: Tensor, given: Tensor, heads: int) -> bool:
    """Whether heads come before positions in `x`; where both are as many, memory tells of what was given.

    A module sees (B, H, T, E) as the transposed view of a projection: there a step to the next head is
    shorter than one to the next position. What it returns may have been copied, so its input is asked.
    """
    if x.shape[-2] != heads or x.shape[-3] != heads:
        return x.shape[-3] == heads
    return given.stride(-3) < given.stride(-2)


def _tokens_first(x: Tensor, args: Arguments, kwargs: Mapping[str, Any]) -> Tensor:
    """(B, T, H, E) of what a norm inside attention makes of (B, H, T, E); other activations as they are.

    Only memory tells the two apart, that of what was given: see `_heads_first`.
    """
    if x.ndim != 4:
        return x
    given = next((t for t in tensors((args, kwargs), depth=2) if t.shape[:3] == x.shape[:3]), x)
    return x.transpose(1, 2) if given.stride(1) < given.stride(2) else x


def _floating(value: object, what: str) -> Tensor:
    x = next((t for t in tensors(value, depth=2) if t.is_floating_point()), None)
    got = type(value).__name__
    if x is not None and x.is_nested:
        raise ValueError(
            f"{what} must be a dense tensor, got a nested one; nn.TransformerEncoder makes none of "
            "padded batches when built with enable_nested_tensor=False."
        )
    if x is None:
        got = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else got
        raise ValueError(f"{what} must be or hold a floating tensor, got {got}; capture another module.")
    if x.ndim < 2:
        raise ValueError(f"{what} must have shape (..., D), two or more, got {got} with {tuple(x.shape)}.")
    return x


def _spatial_axes(module: nn.Module, x: Tensor, inward: bool) -> int | None:
    """How many axes follow the features of `x`; None where neither module nor shape tells.

    A module with channels of its own, as nn.Conv2d, says it by its class; one that scales or projects n
    features by the axis that has n. Of others a tensor of four axes is rows only if nothing in the module
    convolves and it does more than act elementwise.
    """
    module = bare(module)
    axes = spatial_axes(module)
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm):  # (B, C) as well
        return x.ndim - 2
    if axes is not None:
        return min(axes, x.ndim - 1)
    if x.ndim < 4:
        return 0
    features = width_in(module) if inward else width_out(module)
    if features is not None:
        last = x.shape[-1] == features and getattr(module, "data_format", None) != "channels_first"
        return 0 if last else x.ndim - 2 if x.shape[1] == features else None
    convolves = any(spatial_axes(part) for part in module.modules())
    return None if convolves or not any(True for _ in module.parameters()) else 0


def _positions(x: Tensor, axes: int) -> Tensor:
    """Features last, and the `axes` behind them as one axis of positions before."""
    if not axes:
        return x
    x = torch.movedim(x, -1 - axes, -1)  # (..., positions, C)
    return x.flatten(-1 - axes, -2)
