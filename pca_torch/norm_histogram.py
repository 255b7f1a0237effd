"""Counts of row norms in narrow bins: quantiles of a stream, whatever its order, in fixed memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from pca_torch._state import LARGEST_COUNT, Saved, State

__all__ = ["EDGES", "NormHistogram", "undifferentiated"]

BINS_PER_OCTAVE = 128
LOWEST, HIGHEST = -126, 128  # powers of two: the normal range of float32 and bfloat16
BINS = BINS_PER_OCTAVE * (HIGHEST - LOWEST)
RESOLUTION = 2 ** (1 / BINS_PER_OCTAVE) - 1  # width of a bin relative to its lower edge
EDGES = np.concatenate([[0.0], np.exp2(np.arange(BINS + 1) / BINS_PER_OCTAVE + LOWEST)])
MAD_TO_STD = 1.4826  # standard deviation of a normal distribution over its MAD

F = TypeVar("F", bound=Callable[..., Any])


def undifferentiated(method: F) -> F:
    """Run `method` without autograd and outside inference mode, whose tensors could not be updated later."""
    return torch.inference_mode(mode=False)(torch.no_grad()(method))


class NormHistogram:
    """Counts of row norms in 128 bins per octave from 2⁻¹²⁶ to 2¹²⁸; quantiles to half a percent.

    Counts are integers, so neither the order of the rows nor the split into batches matters. Norms
    below the range count as zero, norms above it as the last bin. Inside a bin the rows are taken as
    spread evenly: a quantile lies in the same bin as that of the norms themselves, so it is off by at
    most 0.55 % of its value. Memory: 260 kB on the CPU.
    """

    @undifferentiated
    def __init__(self) -> None:
        self.counts = torch.zeros(BINS + 1, dtype=torch.int64, device="cpu")  # the first counts zeros

    @property
    def n_samples(self) -> int:
        """N, norms counted."""
        return int(self.counts.sum())

    @undifferentiated
    def update(self, norms: Tensor) -> Self:
        """Count `norms`.

        Args:
            norms: non-negative finite numbers (N,).

        Raises:
            ValueError: a norm is negative or not finite.
        """
        norms = norms.double().cpu()
        if norms.numel() and not 0 <= norms.min() <= norms.max() < float("inf"):  # NaN fails too
            bad = int((~(norms.isfinite() & (norms >= 0))).sum())
            raise ValueError(
                f"`norms` must be finite and not negative, got {bad} of {len(norms)} others; drop them."
            )
        place = (norms.log2() - LOWEST).mul(BINS_PER_OCTAVE).floor() + 1  # a zero is at -inf
        place = place.clamp(0, BINS).long()
        self.counts.index_add_(0, place, torch.ones_like(place))
        return self

    @undifferentiated
    def merge(self, other: NormHistogram) -> Self:
        """Absorb the norms of `other`, which stays as it is.

        Args:
            other: counts of other rows.
        """
        self.counts = self.counts + other.counts
        return self

    def median(self) -> float:
        """Smallest norm with half of the rows at or below it.

        Raises:
            ValueError: nothing was counted.
        """
        cdf = self._cdf()
        half = cdf[-1] / 2
        if half == 0:
            raise ValueError("no rows were counted; call `update` with at least one unmasked row first.")
        edge = int(np.searchsorted(cdf, half))
        if edge == 0:  # half of the rows are zero
            return 0.0
        part = (half - cdf[edge - 1]) / (cdf[edge] - cdf[edge - 1])
        return float(EDGES[edge - 1] + part * (EDGES[edge] - EDGES[edge - 1]))

    def mad(self) -> float:
        """Median of |norm - median|: the radius around the median that holds half of the rows."""
        median, cdf = self.median(), self._cdf()
        low, high = 0.0, median  # [0, 2·median] holds all rows up to the median, which is half of them
        for _ in range(60):
            radius = (low + high) / 2
            inside = np.interp(median + radius, EDGES, cdf) - np.interp(median - radius, EDGES, cdf)
            low, high = (low, radius) if inside >= cdf[-1] / 2 else (radius, high)
        return high

    def threshold(self, units: float) -> float:
        """Median + `units` · 1.4826 · MAD, with a MAD no finer than the bins: equal norms stay below it.

        Args:
            units: robust standard deviations above the median.
        """
        median = self.median()
        return median + units * max(MAD_TO_STD * self.mad(), RESOLUTION * median)

    def to_state(self) -> Saved:
        """Tensors and facts from which `from_state` makes the same counts."""
        return {"counts": self.counts}, {}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], facts: Any) -> Self:
        """The counts that `to_state` told of.

        Args:
            tensors: by name.
            facts: as JSON gave them.

        Raises:
            ValueError: they are no counts.
        """
        state, histogram = State(tensors, facts), cls()
        histogram.counts = state.tensor("counts", [BINS + 1], [torch.int64], least=0).cpu()
        state.done()
        if histogram.counts.double().sum() > LARGEST_COUNT:
            raise ValueError("`counts` must add up to less than 2**53.")
        return histogram

    def _cdf(self) -> np.ndarray:
        """(BINS + 2,) rows at or below each edge; zero and the lowest edge have no rows in between."""
        below = self.counts.cumsum(0).double().numpy()
        return np.concatenate([below[:1], below])
