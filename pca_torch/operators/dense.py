"""A covariance whose entries were formed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pca_torch._checks import require_square
from pca_torch.bounds import check_total, constant_columns, standard_deviations
from pca_torch.moments import Moments
from pca_torch.precision import unit_roundoff
from pca_torch.problem import Problem, product_noise

__all__ = ["Dense", "from_moments"]

U64 = unit_roundoff(torch.float64)


@dataclass(frozen=True)
class Dense:
    """A covariance as a matrix (D, D) in float64."""

    problem: Problem
    matrix: Tensor

    @property
    def noise(self) -> float:
        """Rounding of one product over λ₁."""
        return product_noise(len(self.matrix))

    def apply(self, v: Tensor) -> Tensor:
        """Rows (b, D) → v C (b, D).

        Args:
            v: float64 rows.
        """
        return v @ self.matrix


def from_moments(
    moments: Moments, *, center: bool = True, standardize: bool = False, ddof: float = 1
) -> Dense:
    """The covariance, second moment or correlation matrix of a statistic.

    Args:
        moments: the statistic; nothing is shared with it.
        center: subtract the mean; without it the second moment is decomposed.
        standardize: divide each column by its standard deviation.
        ddof: delta degrees of freedom of the divisor.

    Raises:
        ValueError: too few rows for `ddof`, D×D does not fit, or the total variance overflowed.
    """
    divisor = moments.divisor(ddof)
    require_square(moments.n_features, 4, moments.mean.device, "use `svd_solver='full'` on the data itself")
    mean, matrix = moments.mean, moments.covariance(ddof)
    second_moment = matrix.diagonal() * (divisor / moments.sum_weights) + mean.square()
    error = moments.scatter_error() / divisor
    if not center:
        matrix += torch.outer(mean, mean) * (moments.sum_weights / divisor)  # a sum: nothing cancels
        error += 8 * U64 * mean.square().sum().item() * moments.sum_weights / divisor
        mean = torch.zeros_like(mean)
    check_total(matrix.trace())
    problem = Problem(
        mean=mean,
        scale=None,
        variance=matrix.diagonal().clone(),
        second_moment=second_moment,
        n_samples=moments.n_samples,
        divisor=divisor,
        dtype=moments.input_dtype or torch.float64,
        centred=center,
        constant=bool(constant_columns(matrix.diagonal(), mean).all()),
        error=error,
        products=str(moments.product_dtype).removeprefix("torch."),
        measured=moments.product_dtype != torch.float64,
    )
    return _standardised(moments, Dense(problem, matrix)) if standardize else Dense(problem, matrix)


def _standardised(moments: Moments, plain: Dense) -> Dense:
    """Rows and columns over the standard deviations.

    The error is twice that of the scaled sums, for the scale itself is off by their relative error.
    """
    problem, mean = plain.problem, moments.mean
    scale = standard_deviations(problem.variance, problem.mean)
    matrix = plain.matrix / torch.outer(scale, scale)
    error = moments.scatter_error(scale) / problem.divisor
    if not problem.centred:
        error += 8 * U64 * (mean / scale).square().sum().item() * moments.sum_weights / problem.divisor
    check_total(matrix.trace())
    facts = replace(
        problem,
        scale=scale,
        variance=matrix.diagonal().clone(),
        second_moment=problem.second_moment / scale.square(),
        error=2 * error,
    )
    return Dense(facts, matrix)
