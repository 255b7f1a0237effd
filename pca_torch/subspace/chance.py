"""The overlap that two subspaces have by chance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pca_torch._checks import check_choice, check_whole

__all__ = ["RandomOverlap", "random_overlap"]


@dataclass(frozen=True)
class RandomOverlap:
    """Mean and standard deviation of the overlap of two random subspaces."""

    mean: float
    std: float

    def sigmas(self, overlap: float) -> float | None:
        """How many standard deviations an overlap lies above chance; None where chance has no spread.

        Args:
            overlap: normalised in the same way.
        """
        return (overlap - self.mean) / self.std if self.std > 0 else None


def random_overlap(k_a: int, k_b: int, d: int, normalise: Literal["min", "max"] = "min") -> RandomOverlap:
    """Mean and standard deviation of the `overlap` of two independent, uniformly random subspaces.

    Of projectors P, Q of ranks i, j in D dimensions, tr PQ has the mean ij/D. Their parts without a trace
    have the squared norms i(D-i)/D and j(D-j)/D; a random rotation spreads the one evenly over the
    (D-1)(D+2)/2 dimensions of symmetric matrices without a trace, so that the variance of tr PQ is the
    product of the two norms over that number: 2ij(D-i)(D-j) / (D²(D-1)(D+2)).

    Args:
        k_a: i, dimension of the one.
        k_b: j, dimension of the other.
        d: D, dimension of the space.
        normalise: the overlap is over the smaller ("min") or the larger ("max") of i and j.

    Raises:
        ValueError: a dimension below 0 or above D.
    """
    check_choice(normalise, "normalise", ("min", "max"))
    check_whole(d, "d", 1)
    for name, k in (("k_a", k_a), ("k_b", k_b)):
        check_whole(k, name, 0)
        if k > d:
            raise ValueError(f"`{name}` must be in 0..{d}, the dimension of the space, got {k}.")
    size = min(k_a, k_b) if normalise == "min" else max(k_a, k_b)
    if size == 0:
        return RandomOverlap(0.0, 0.0)
    spread = k_a * (d - k_a) * k_b * (d - k_b)
    variance = 2 * spread / (d * d * (d - 1) * (d + 2)) if spread else 0.0
    return RandomOverlap(k_a * k_b / d / size, math.sqrt(variance) / size)
