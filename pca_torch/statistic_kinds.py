"""The statistics that are kept of a site, and how each is made again from what was saved of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pca_torch.head_moments import HeadMoments
from pca_torch.moments import Moments
from pca_torch.tokens import TokenViews

__all__ = ["Statistic", "rebuilt"]

Statistic = TokenViews[Any] | Moments | HeadMoments

KINDS = {"moments": Moments.from_state, "head_moments": HeadMoments.from_state}  # a new one: one row


def rebuilt(tensors: Mapping[str, Tensor], facts: Any) -> Statistic:
    """The statistic whose `to_state` gave these.

    Args:
        tensors: by name, on the device where the sums shall lie.
        facts: as JSON gave them.

    Raises:
        ValueError: no statistic can be like that.
    """
    if isinstance(facts, dict) and facts.get("kind") == "views":
        return TokenViews.from_state(tensors, facts, _inner)
    return _inner(tensors, facts)


def _inner(tensors: Mapping[str, Tensor], facts: Any) -> Moments | HeadMoments:
    """A statistic that is not one of statistics.

    Raises:
        ValueError: there is no such kind.
    """
    kind = facts.get("kind") if isinstance(facts, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"`kind` must be one of views, {', '.join(KINDS)}, got {kind!r:.80}.")
    return KINDS[kind](tensors, facts)
