"""Which tokens of a forward count: read once per forward, fitted once to each shape of activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pca_torch._arguments import arguments_by_name, padding_of

__all__ = ["FindMask", "Rows", "Tokens", "read_tokens"]

FindMask = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Tensor | None]


class Rows:
    """The rows of one shape of activations that count.

    Args:
        mask: booleans in the leading shape of the activations; None keeps every row.
        places: integers in that shape, the place of each row in its sequence; None is unknown.
    """

    def __init__(self, mask: Tensor | None, places: Tensor | None) -> None:
        self.mask = mask
        self.places = places

    @cached_property
    def index(self) -> Tensor | None:
        """(n,) numbers of the rows that count, None for all of them."""
        return None if self.mask is None else self.mask.flatten().nonzero()[:, 0]

    @cached_property
    def positions(self) -> Tensor | None:
        """(n,) places of the rows that count, None where unknown."""
        if self.places is None:
            return None
        places = self.places.flatten()
        return places if self.index is None else places.index_select(0, self.index)

    def of(self, x: Tensor) -> Tensor:
        """(n, D) rows of `x` (..., D); where all count they may share its memory."""
        rows = x.flatten(0, -2)
        return rows if self.index is None else rows.index_select(0, self.index)

    def narrowed(self, only: Tensor) -> Rows:
        """Those of the rows where `only` holds too.

        Args:
            only: booleans in the leading shape of the activations.
        """
        return Rows(only if self.mask is None else self.mask & only, self.places)


class Tokens:
    """The tokens of one forward.

    Args:
        keep: booleans (B, T), or None for all.
        places: integers (B, T), the place of each token in its sequence, or None.
    """

    def __init__(self, keep: Tensor | None, places: Tensor | None = None) -> None:
        self.shape = None if keep is None else tuple(keep.shape)
        self.keep = None if keep is None or bool(keep.all()) else keep
        self.places = places
        self._fitted: dict[tuple[torch.Size, torch.device], Rows] = {}

    def rows(self, x: Tensor) -> Rows:
        """Which rows of `x` (..., D) count: worked out once per forward, device and leading shape.

        Args:
            x: activations with the tokens leading: (B, T, D), (B, T, ..., D) or (B·T, D).

        Raises:
            ValueError: the leading shape is none of these.
        """
        key = x.shape[:-1], x.device
        if key not in self._fitted:
            self._fitted[key] = self._fit(x)
        return self._fitted[key]

    def routed_rows(self, x: Tensor, name: str) -> Rows:
        """Which rows of `x` count, the activations of an expert: tokens (n, D) in an order of their own.

        Args:
            x: activations; where they lead with (B, T), no row was routed.
            name: the path of the module, for the message.

        Raises:
            ValueError: tokens are left out, and which rows are theirs is not known.
        """
        if x.ndim > 2:
            return self.rows(x)
        if self.keep is not None:
            holder = name.partition("experts.")[0].rstrip(".")
            raise ValueError(
                f"the mask leaves tokens out, and which rows of an expert of {holder!r} are theirs is not "
                f"known here; capture '{holder}:input', what all experts get, or give batches without "
                "padding and leave no token out."
            )
        return Rows(None, None)

    def _fit(self, x: Tensor) -> Rows:
        lead, device = x.shape[:-1], x.device
        if self.shape is None:
            return Rows(None, _counted(lead, device))
        flat = lead == (self.shape[0] * self.shape[1],)
        if lead[:2] != self.shape and not flat:
            raise ValueError(
                f"the activations of shape {tuple(x.shape)} do not fit the mask {self.shape}; pass `mask` as "
                "a callable that returns one that fits, or None to keep every row."
            )

        def fitted(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            values = values.to(device)
            if flat:
                return values.flatten()
            return values.reshape(*values.shape, *[1] * (len(lead) - 2)).expand(lead)

        return Rows(fitted(self.keep), fitted(self.places))


def _counted(lead: torch.Size, device: torch.device) -> Tensor | None:
    """Places along T in activations that lead with (B, T); None where they lead with rows."""
    if len(lead) < 2:
        return None
    places = torch.arange(lead[1], device=device)
    return places.reshape(-1, *[1] * (len(lead) - 2)).expand(lead)


def read_tokens(
    source: str | FindMask,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    of_input: bool = True,
) -> Tokens | None:
    """The tokens of one forward, cut to the columns of its input; None where nothing marks them.

    Args:
        source: the argument that marks the rows to keep, or a callable that makes the mask; one with an
            attribute `positions`, a tensor like the mask, says the places too.
        module: the root that is called.
        args: of the call.
        kwargs: of the call.
        of_input: the mask is of what the root is given, not of what it attends to besides.

    Raises:
        ValueError: the mask is not a (B, T) tensor of 0 and 1.
    """
    name = source if isinstance(source, str) else "mask"
    arguments, _ = arguments_by_name(module, args, kwargs)
    mask = (
        padding_of(arguments.get(source), arguments)
        if isinstance(source, str)
        else source(module, args, kwargs)
    )
    if mask is None:
        return None
    remedy = "pass such a one, or make it with a callable as `mask`"
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"`{name}` must be a 2-D tensor (B, T) to select rows, got {got}; {remedy}.")
    keep = mask.bool()
    if mask.dtype != torch.bool and not bool((mask == keep).all()):  # once per forward, sites need not look
        raise ValueError(f"`{name}` must hold 0 and 1 only to select rows, got other values; {remedy}.")
    places = getattr(source, "positions", None)
    if not isinstance(places, Tensor) or places.shape != keep.shape:
        places = keep.cumsum(1) - 1  # of what was seen before a decoding step too
    if not of_input:
        return Tokens(keep, places)
    # The input says how long this step is; an output with fewer columns may be pooled, not decoded.
    inputs = (arguments.get("inputs_embeds"), arguments.get("input_ids"), *arguments.values())
    first = next((value for value in inputs if isinstance(value, Tensor)), None)
    columns = None if first is None or first.ndim < 2 else -first.shape[1]
    return Tokens(keep[:, columns:], places[:, columns:])
