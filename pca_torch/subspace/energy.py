"""How much of the variance lies along directions, or within the span of another basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pca_torch._checks import as_rows
from pca_torch.eigen import small_eigvalsh
from pca_torch.moments import Moments
from pca_torch.precision import exact_products
from pca_torch.result import PCAResult
from pca_torch.subspace.spans import orthonormal_rows

__all__ = ["CapturedShare", "captured", "captured_between", "captured_share", "share_within"]


@dataclass(frozen=True)
class CapturedShare:
    """Share of a total variance within a span: between `low` and `high`, equal where it is exact."""

    low: float
    high: float


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


def captured_share(data: Moments | PCAResult | Any, basis: PCAResult | Any) -> CapturedShare:
    """Share of the total variance of `data` that lies within the span of `basis`.

    Of a statistic, or of samples, it is exact. A `PCAResult` knows its K components and at most the variances
    of the others, not where those point: what they add lies between the sums of their variances over the
    squared sines that the span makes with the components, paired in opposite and in equal order
    (von Neumann's trace inequality). Without dropped variance both ends meet.

    Args:
        data: a `Moments`, a `PCAResult`, or samples (..., D).
        basis: rows (K, D), one row (D,), or a `PCAResult`; see `orthonormal_rows`.

    Returns:
        Both ends are 0 where `data` has no variance, or `basis` no dimension.

    Raises:
        ValueError: another D, NaN or inf, or no samples.
    """
    if not isinstance(data, Moments | PCAResult):
        rows, _ = as_rows(data)
        data = Moments(rows.shape[1]).update(rows)
    span = orthonormal_rows(basis)
    if span.shape[1] != data.n_features:
        raise ValueError(
            f"`basis` must end in {data.n_features} features, as `data` has, got shape {tuple(span.shape)}."
        )
    return share_within(data, span)


def share_within(data: Moments | PCAResult, span: Tensor) -> CapturedShare:
    """`captured_share` of rows that are orthonormal, unchecked.

    Args:
        data: a `Moments` or a `PCAResult`.
        span: (R, D) float64.
    """
    with exact_products(span.device):
        if isinstance(data, PCAResult):
            return _of_result(data, span)
        return _of_covariance(data.covariance(ddof=0), span)


def captured_between(a: PCAResult, b: PCAResult) -> tuple[CapturedShare, CapturedShare]:
    """Share of the variance of `a` within the components of `b`, and the reverse.

    With the statistics at hand `captured_share` is exact.

    Args:
        a: a result.
        b: another, with the same D.

    Raises:
        ValueError: another D, or one of them alone is standardised.
    """
    if (a.scale is None) != (b.scale is None):
        raise ValueError("`a` and `b` must both be standardised, or neither, got one that is.")
    return captured_share(a, b), captured_share(b, a)


def _of_covariance(covariance: Tensor, span: Tensor) -> CapturedShare:
    total = covariance.trace().item()
    if total <= 0:
        return CapturedShare(0.0, 0.0)
    span = span.to(covariance.device)
    share = min(1.0, ((span @ covariance) * span).sum().item() / total)
    return CapturedShare(share, share)


def _of_result(result: PCAResult, span: Tensor) -> CapturedShare:
    """Exact within the components that are kept, and bounds on what the others add."""
    total = result.total_variance.item()
    if total <= 0 or not len(span):
        return CapturedShare(0.0, 0.0)
    kept = torch.linalg.qr(result.components.detach().double().mT).Q.mT.to(span.device)  # up to signs
    inner = span @ kept.mT
    inside = (inner.square().sum(0) @ result.explained_variance.to(span.device)).item()
    rest = _dropped(result).to(span.device)  # (D - K,) descending
    left = span - inner @ kept
    outside = small_eigvalsh(left @ left.mT).flip(0).clamp(0, 1)[: len(rest)].to(span.device)
    sines = torch.zeros_like(rest)  # squared
    sines[: len(outside)] = outside
    low, high = (sines @ rest.flip(0)).item(), (sines @ rest).item()
    return CapturedShare(min(1.0, (inside + low) / total), min(1.0, (inside + high) / total))


def _dropped(result: PCAResult) -> Tensor:
    """(D - K,) variances of the directions beyond the components, descending, as uneven as they can be.

    Of those that were not computed only the sum is known, and that none is larger than the last that was: the
    most uneven way to share the sum gives the widest bounds.
    """
    k, d = result.n_components, result.n_features
    rest = torch.zeros(d - k, dtype=torch.float64, device="cpu")
    known = result.spectrum[k:].cpu()
    rest[: len(known)] = known
    missing = (result.total_variance - result.spectrum.sum()).item()
    largest = result.spectrum[-1].item() if len(result.spectrum) else missing
    for i in range(len(known), d - k):
        if missing <= 0 or largest <= 0:
            break
        rest[i] = min(missing, largest)
        missing -= rest[i].item()
    return rest
