"""`tsqr`: the SVD of the triangular factor of a stream. Keeps every variance that one pass can keep."""

from __future__ import annotations

import math

import torch

from pca_torch._checks import require_square
from pca_torch.bounds import (
    Solved,
    assemble,
    check_count,
    check_total,
    constant_columns,
    factor_errors,
    standard_deviations,
)
from pca_torch.precision import component_dtype, exact_products, factor_noise
from pca_torch.result import PCAResult
from pca_torch.rfactor import RFactor
from pca_torch.svd import robust_svd

__all__ = ["solve"]


def solve(
    statistic: RFactor,
    n_components: float | None = None,
    *,
    center: bool = True,
    standardize: bool = False,
    whiten: bool = False,
    ddof: float = 1,
) -> PCAResult:
    """Principal directions from the triangular factor of a statistic; nothing is squared.

    Args:
        statistic: the triangular factor; it may go on afterwards, nothing is shared.
        n_components: K, a share in (0, 1], or None for min(N, D).
        center: subtract the mean; without it the second moment is decomposed.
        standardize: divide each column by its standard deviation.
        whiten: mark the result as whitening and drop directions that are null to rounding.
        ddof: delta degrees of freedom of the divisor.

    Raises:
        ValueError: too few rows for `ddof`, or `n_components` out of range.

    Accuracy: backward stable, each singular value is off by a few u·σ₁ per factorisation of the stream.
    """
    divisor = statistic.divisor(ddof)
    n, d = statistic.n_samples, statistic.n_features
    check_count(n_components, n, d)
    mean, r = statistic.mean, statistic.r
    require_square(d, 6, r.device, "use `svd_solver='full'` on the data itself")
    with exact_products(r.device):
        relative = statistic.error + factor_noise(len(r), d, torch.float64)
        if not center:  # one row more: RᵀR + Σw·mean·meanᵀ, nothing cancels
            r = torch.cat([r, math.sqrt(statistic.sum_weights) * mean[None]])
            mean = torch.zeros_like(mean)
        variance = r.square().sum(0) / divisor
        constant = bool(constant_columns(variance, mean).all())
        second_moment = variance * (divisor / statistic.sum_weights) + mean.square()
        scale = None
        if standardize:
            scale = standard_deviations(variance, mean)
            r, variance, second_moment = r / scale, variance / scale.square(), second_moment / scale.square()
            relative *= 2  # the scale is off by as much as its column
        check_total(variance.sum())
        s, vh, tried = robust_svd(r)
        s, vh = s[: min(n, d)], vh[: min(n, d)]  # the mean shifts bring more rows than there are samples
        spectrum = s.square() / divisor
        error, floor = factor_errors(spectrum, relative)
        work = statistic.product_dtype
        solved = Solved(
            mean=mean,
            scale=scale,
            spectrum=spectrum,
            directions=vh,
            total_variance=variance.sum(),
            second_moment=second_moment,
            error=error,
            floor=floor,
            values=s,
            perturbation=relative * s[0].item(),
            apply=lambda v: (v @ r.mT @ r) / divisor,
            n_samples=n,
            divisor=divisor,
            dtype=statistic.input_dtype or torch.float64,
            constant=constant,
            solver="tsqr",
            precision=f"{str(work).removeprefix('torch.')} QR, float64 SVD of R",
            fallbacks=tuple(f"tsqr: {failure}" for failure in tried),
        )
        return assemble(
            solved,
            n_components,
            dtype=torch.float32 if work == torch.float32 else component_dtype(solved.dtype),
            centred=center,
            whiten=whiten,
        )
