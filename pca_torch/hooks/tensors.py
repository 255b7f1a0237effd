"""What PyTorch does around modules that a hook has to know of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["recomputing", "whole"]


def recomputing() -> bool:
    """Whether the backward pass is running: then activation checkpointing computes what was seen before."""
    return torch._C._current_graph_task_id() != -1


def whole(x: Tensor) -> Tensor:
    """`x` as a plain tensor, where it is one of tensor parallelism that every rank holds whole.

    Args:
        x: activations of one rank.

    Raises:
        ValueError: this rank holds a part of them.
    """
    placements: Any = getattr(x, "placements", None)  # of a DTensor, whose class takes long to import
    if placements is None:
        return x
    if all(placement.is_replicate() for placement in placements):
        return x.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    raise ValueError(
        f"the activations are spread over ranks, a DTensor placed as {tuple(placements)}; capture a site "
        "that every rank holds whole, such as the output of the block."
    )
