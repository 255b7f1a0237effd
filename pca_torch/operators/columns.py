"""What the columns of samples say of their covariance before any product is formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pca_torch._checks import divisor_of
from pca_torch.bounds import check_total, constant_columns, standard_deviations
from pca_torch.precision import unit_roundoff
from pca_torch.problem import Problem

__all__ = ["Columns", "facts"]

U64 = unit_roundoff(torch.float64)
ENTRY = 16  # an entry is shifted twice, scaled and weighted, on both sides of its square, with room of two


@dataclass(frozen=True)
class Columns:
    """Sums of each column of N samples, in float64."""

    n_samples: int  # N, rows of weight zero left out
    weight: float  # Σw
    weight_sq: float  # Σw²
    mean: Tensor  # (D,)
    scatter: Tensor  # (D,) Σ w (x - mean)²
    slip: Tensor  # (D,) what the mean that products subtract may be off by
    depth: int  # longest chain of additions behind an entry of the scatter
    dtype: torch.dtype  # of the data


def facts(columns: Columns, *, center: bool, standardize: bool, ddof: float) -> Problem:
    """The problem of float64 products with rows that are centred and scaled on the way.

    A mean that is off by t adds Σw·ttᵀ to the scatter and nothing else, for the rows sum to zero around
    the true one. Rounded entries z(1 + δ) add at most 2δ|Z|ᵀ|Z|, whose norm is at most 2δ tr. A scale
    whose square is a sum of depth n is off by nu/2, and changes a correlation by nu on both sides.

    Args:
        columns: their sums.
        center: subtract the mean.
        standardize: divide each column by its standard deviation.
        ddof: delta degrees of freedom of the divisor.

    Raises:
        ValueError: too few rows for `ddof`, or the total variance overflowed.
    """
    divisor = divisor_of(columns.n_samples, columns.weight, columns.weight_sq, ddof)
    share = columns.weight / divisor
    mean, variance, slip = columns.mean, columns.scatter / divisor, columns.slip
    second_moment = columns.scatter / columns.weight + mean.square()
    if not center:
        variance = variance + share * mean.square()  # a sum: nothing cancels
        mean, slip = torch.zeros_like(mean), torch.zeros_like(slip)
    check_total(variance.sum())
    constant = bool(constant_columns(variance, mean).all())
    scale, roundings = None, ENTRY
    if standardize:
        scale = standard_deviations(variance, mean)
        variance, second_moment = variance / scale.square(), second_moment / scale.square()
        slip, roundings = slip / scale, ENTRY + columns.depth
    return Problem(
        mean=mean,
        scale=scale,
        variance=variance,
        second_moment=second_moment,
        n_samples=columns.n_samples,
        divisor=divisor,
        dtype=columns.dtype if columns.dtype.is_floating_point else torch.float64,
        centred=center,
        constant=constant,
        error=roundings * U64 * variance.sum().item() + share * slip.square().sum().item(),
        products="float64",
    )
