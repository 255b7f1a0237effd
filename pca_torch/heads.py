"""The heads of one attention layer, decomposed one by one: what a report says about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pca_torch.head_moments import HeadMoments
from pca_torch.result import ExtremeRows, PCAResult
from pca_torch.solvers import covariance
from pca_torch.threads import one_thread
from pca_torch.tokens import TokenViews

__all__ = ["Heads", "HeadsReport", "decompose_heads", "heads_report", "report_heads"]

Heads = tuple[PCAResult, ...]  # one per head, in the order of the heads


@dataclass(frozen=True, eq=False)
class HeadsReport:
    """What the main job says about the heads of one site: around their mean, and around zero.

    Keys and values are used uncentred by some methods and centred by others, and the number of dimensions
    depends on it more than on anything else; so both are here.
    """

    all_tokens: Heads  # centred
    typical: Heads  # centred
    all_tokens_uncentred: Heads  # of the second moment: `mean` is zero, `centred` false
    typical_uncentred: Heads
    extreme: ExtremeRows  # by the norm of all heads together
    kind: str = "head"  # "q", "k", "v", or what else the heads are of
    rope: Literal["pre", "post"] | None = None  # for queries and keys that are rotated
    layer: int | None = None

    @property
    def heads(self) -> int:
        """H."""
        return len(self.typical)

    @property
    def width(self) -> int:
        """E."""
        return self.typical[0].n_features


def decompose_heads(
    statistic: HeadMoments, n_components: float | None = None, *, center: bool = True, ddof: float = 1
) -> Heads:
    """Principal directions of every head, each with its certificate.

    Args:
        statistic: of the heads; it may go on afterwards, nothing is shared.
        n_components: K of each head, a share of its variance in (0, 1], which keeps another number of each,
            or None for all.
        center: subtract the mean; without it the second moment is decomposed.
        ddof: delta degrees of freedom of the divisor.

    Raises:
        ValueError: too few rows for `ddof`, or `n_components` out of range.
    """
    with one_thread(statistic.width):
        return tuple(
            covariance.solve(statistic.head(i), n_components, center=center, ddof=ddof)
            for i in range(statistic.heads)
        )


def report_heads(
    views: TokenViews[HeadMoments],
    n_components: float | None = None,
    *,
    kind: str = "head",
    rope: Literal["pre", "post"] | None = None,
    layer: int | None = None,
) -> HeadsReport:
    """Every head of a site: all tokens and those of typical norm, centred and not.

    Args:
        views: what was captured.
        n_components: directions kept of each head, as in `decompose_heads`.
        kind: what the heads are of, such as "k".
        rope: whether they were captured before or after the rotation.
        layer: index of the block.

    Raises:
        ValueError: too few tokens, or `n_components` out of range.
    """
    return heads_report(*views.result(), n_components, kind=kind, rope=rope, layer=layer)


def heads_report(
    every: HeadMoments,
    typical: HeadMoments,
    extreme: ExtremeRows,
    n_components: float | None = None,
    *,
    kind: str = "head",
    rope: Literal["pre", "post"] | None = None,
    layer: int | None = None,
) -> HeadsReport:
    """`report_heads` of what views have come to.

    Args:
        every: of all tokens.
        typical: of those of typical norm; the same object where no other was set apart.
        extreme: the others.
        n_components: directions kept of each head.
        kind: what the heads are of.
        rope: whether they were captured before or after the rotation.
        layer: index of the block.
    """
    centred, uncentred = (decompose_heads(every, n_components, center=flag) for flag in (True, False))
    of_typical = [centred, uncentred]  # where both views are the same
    if typical is not every:
        of_typical = [decompose_heads(typical, n_components, center=flag) for flag in (True, False)]
    return HeadsReport(
        all_tokens=centred,
        typical=of_typical[0],
        all_tokens_uncentred=uncentred,
        typical_uncentred=of_typical[1],
        extreme=extreme,
        kind=kind,
        rope=rope,
        layer=layer,
    )
