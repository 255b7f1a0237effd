"""`covariance_eigh`: the eigenproblem of the centred scatter. Fast for many samples; squares κ."""

from __future__ import annotations

import torch
from torch import Tensor

from pca_torch._checks import require_square
from pca_torch.bounds import Solved, assemble, check_total, constant_columns, standard_deviations
from pca_torch.moments import Moments
from pca_torch.precision import component_dtype, exact_products, unit_roundoff
from pca_torch.result import PCAResult

__all__ = ["solve"]

U64 = unit_roundoff(torch.float64)


def solve(
    moments: Moments,
    n_components: float | None = None,
    *,
    center: bool = True,
    standardize: bool = False,
    whiten: bool = False,
    ddof: float = 1,
) -> PCAResult:
    """Principal directions from the scatter of a statistic.

    Args:
        moments: the statistic; it may go on afterwards, nothing is shared.
        n_components: K, a share in (0, 1], or None for min(N, D).
        center: subtract the mean; without it the second moment is decomposed.
        standardize: decompose the correlation matrix.
        whiten: mark the result as whitening and drop directions that are null to rounding.
        ddof: delta degrees of freedom of the divisor.

    Raises:
        ValueError: too few rows for `ddof`, or `n_components` out of range.

    Accuracy: every variance is off by at most ‖E‖ + D·u·λ₁, so those below √u·σ₁ are lost where
    an SVD of the samples keeps them: κ(XᵀX) = κ(X)².
    """
    divisor = moments.divisor(ddof)
    require_square(moments.n_features, 4, moments.mean.device, "use `svd_solver='full'` on the data itself")
    with exact_products(moments.mean.device):
        mean, covariance = _problem(moments, divisor, ddof, center)
        second_moment = moments.covariance(0).diagonal() + moments.mean.square()
        constant = bool(constant_columns(covariance.diagonal(), mean).all())
        scale = None
        if standardize:
            scale = standard_deviations(covariance.diagonal(), mean)
            covariance = covariance / torch.outer(scale, scale)
            second_moment = second_moment / scale.square()
        check_total(covariance.trace())
        variance, vectors = torch.linalg.eigh(covariance)
        most = min(moments.n_samples, moments.n_features)
        variance = variance.flip(0)[:most]
        off = _error(moments, divisor, center, scale) + (moments.n_features + 8) * U64 * variance[0].item()
        products = str(moments.product_dtype).removeprefix("torch.")
        solved = Solved(
            mean=mean,
            scale=scale,
            spectrum=variance,
            directions=vectors.mT.flip(0)[:most],
            total_variance=covariance.trace(),
            second_moment=second_moment,
            error=torch.full_like(variance, off),
            floor=off,
            values=variance,
            perturbation=off,
            apply=lambda v: v @ covariance,
            n_samples=moments.n_samples,
            divisor=divisor,
            dtype=moments.input_dtype or torch.float64,
            constant=constant,
            solver="covariance_eigh",
            precision=f"{products} products, float64 sums and eigh",
            deterministic=moments.product_dtype == torch.float64,
        )
        return assemble(
            solved, n_components, dtype=component_dtype(solved.dtype), centred=center, whiten=whiten
        )


def _problem(moments: Moments, divisor: float, ddof: float, center: bool) -> tuple[Tensor, Tensor]:
    """Mean that is subtracted, and the matrix to decompose."""
    mean, covariance = moments.mean, moments.covariance(ddof)
    if center:
        return mean, covariance
    outer = torch.outer(mean, mean) * (moments.sum_weights / divisor)  # a sum: nothing cancels
    return torch.zeros_like(mean), covariance + outer


def _error(moments: Moments, divisor: float, center: bool, scale: Tensor | None) -> float:
    """Bound on ‖computed - true‖₂ of the matrix to decompose.

    Twice that of the scaled sums when standardised: the scale itself is off by their relative error.
    """
    error = moments.scatter_error(scale) / divisor
    if not center:
        mean = moments.mean if scale is None else moments.mean / scale
        error += 8 * U64 * mean.square().sum().item() * moments.sum_weights / divisor
    return error if scale is None else 2 * error
