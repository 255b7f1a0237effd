"""Variance along chosen directions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pca_torch._checks import as_rows
from pca_torch.moments import Moments
from pca_torch.precision import exact_products

__all__ = ["captured"]


def captured(statistic: Moments | Any, basis: Any, *, ddof: float = 1) -> Tensor:
    """Variance of the samples along each direction, vᵀCv / vᵀv, in activation units squared.

    The sum over orthonormal directions, over the total variance, is the share that their span
    captures: `captured(m, v).sum() / (m.trace / m.divisor())`.

    Args:
        statistic: a `Moments`, or samples (..., D).
        basis: directions as rows (K, D) or one direction (D,); they need not have unit length.
        ddof: delta degrees of freedom of the variance.

    Returns:
        (K,) float64, or a scalar tensor for one direction.

    Raises:
        ValueError: another D, a direction that is zero or not finite, or too few rows for `ddof`.
    """
    if not isinstance(statistic, Moments):
        rows, _ = as_rows(statistic)
        statistic = Moments(rows.shape[1]).update(rows)
    v, shape = as_rows(basis, statistic.n_features, name="basis")
    covariance = statistic.covariance(ddof)
    v = v.to(covariance.device).double()
    size = v.abs().amax(1, keepdim=True)
    if not bool(((size > 0) & size.isfinite()).all()):
        raise ValueError(
            "`basis` must hold finite directions of non-zero length, got a row of zeros, NaN or inf; drop it."
        )
    v = v / size  # squares of very long or short directions would leave the range of float64
    with exact_products(v.device):
        return ((v @ covariance * v).sum(1) / v.square().sum(1)).reshape(shape)
