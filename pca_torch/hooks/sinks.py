"""What takes the activations, and how they are handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pca_torch.hooks.masks import Rows

__all__ = ["Sink", "Statistic", "check_sink", "hand_over"]


@runtime_checkable
class Statistic(Protocol):
    """What `capture` hands whole activations to.

    One that also has `update_rows(rows, positions=None)` gets the kept rows (n, D) instead, and the
    integer place (n,) of each in its sequence or None; rows may share memory with the activations.
    One that also has `copy_from(other)`, after which it holds what `other` holds, can take part in
    sharing.
    """

    def update(self, x: Tensor, /, *, mask: Tensor | None = None) -> object:
        """Absorb `x` (..., D), of which `mask` (...) keeps some rows, None all."""
        ...


Sink = Statistic | Callable[[Tensor], object]


def check_sink(label: str, sink: object) -> None:
    """Refuse what can take nothing.

    Args:
        label: the site, for the message.
        sink: what was given for it.

    Raises:
        TypeError: `sink` is no sink.
    """
    if isinstance(sink, nn.Module) and not hasattr(sink, "update"):
        raise TypeError(f"`sinks[{label!r}]` is a module, calling it keeps nothing; pass its `partial_fit`.")
    if not callable(sink) and not callable(getattr(sink, "update", None)):
        raise TypeError(
            f"`sinks[{label!r}]` must be callable or have an `update` method, got {type(sink).__name__}."
        )


def hand_over(sink: Sink, x: Tensor, rows: Rows) -> None:
    """Give `x` to a statistic, or its kept rows to a callable.

    Args:
        sink: takes them, without autograd, autocast or inference mode.
        x: activations (..., D).
        rows: which of them count.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x = x.detach()
        update_rows = getattr(sink, "update_rows", None)
        if callable(update_rows):
            update_rows(rows.of(x), positions=rows.positions)
        elif isinstance(sink, Statistic):
            sink.update(x, mask=rows.mask)
        else:
            kept = rows.of(x)
            sink(kept.clone() if rows.index is None else kept)  # it may keep them, the model its memory
