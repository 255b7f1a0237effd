"""What one site keeps while a model runs."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor

from pca_torch.head_moments import HeadMoments
from pca_torch.moments import Moments
from pca_torch.precision import Precision
from pca_torch.tokens import TokenViews

__all__ = ["SiteStatistic"]

HELD = 256  # rows a site holds aside at most: with D = 4096 in float32 that is 4 MiB


class SiteStatistic:
    """The sink of one site: both token views, made when the first rows say how wide they are.

    Args:
        heads: H, if the features of each are to be decomposed apart from those of the others; None is all at
            once.
        precision: arithmetic of the products.
        device: where the sums lie; None is the device of the rows.
        n_components: what will be asked of it; a count that the site cannot give is refused at once.
    """

    def __init__(
        self,
        heads: int | None = None,
        *,
        precision: Precision = "auto",
        device: torch.device | None = None,
        n_components: float | None = None,
    ) -> None:
        self.heads = heads
        self.precision: Precision = precision
        self.device = device
        self.n_components = n_components
        self.views: TokenViews[Moments] | TokenViews[HeadMoments] | None = None

    @property
    def n_samples(self) -> int:
        """N, rows counted."""
        return 0 if self.views is None else self.views.n_samples

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Count the rows of one activation.

        Args:
            x: (..., D), all heads side by side.
            mask: 0/1 in the leading shape.
        """
        self._made(x).update(x, mask=mask)

    def update_rows(self, rows: Tensor, positions: Tensor | None = None) -> None:
        """Count rows that were selected before.

        Args:
            rows: (n, D).
            positions: (n,) the place of each in its sequence.
        """
        self._made(rows).update_rows(rows, positions=positions)

    def copy_from(self, other: SiteStatistic) -> None:
        """Hold what `other` holds.

        Args:
            other: the statistic of a site that saw the same tensors.
        """
        self.views = copy.deepcopy(other.views)

    def _made(self, x: Tensor) -> TokenViews[Moments] | TokenViews[HeadMoments]:
        """The views.

        Raises:
            ValueError: more components are wanted than there are features.
        """
        if self.views is None:
            d, device = x.shape[-1], self.device or x.device
            width = d // (self.heads or 1)
            if isinstance(self.n_components, int) and self.n_components > width:  # now, not after the work
                raise ValueError(f"`n_components` must be in 0..{width}, got {self.n_components}.")
            exact: Precision = "auto" if device.type == "mps" else "float64"  # for the few extreme rows
            if self.heads is not None:
                make = [
                    partial(HeadMoments, self.heads, width, precision=precision, device=device)
                    for precision in (self.precision, exact)
                ]
                self.views = TokenViews[HeadMoments](*make, max_held=HELD)
            else:
                make = [
                    partial(Moments, d, precision=precision, device=device)
                    for precision in (self.precision, exact)
                ]
                self.views = TokenViews[Moments](*make, max_held=HELD)
        return self.views
