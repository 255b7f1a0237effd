"""`full`: the SVD of the centred samples. The reference: keeps every variance that the data hold."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pca_torch._checks import divisor_of
from pca_torch.bounds import (
    Solved,
    assemble,
    check_count,
    constant_columns,
    factor_errors,
    standard_deviations,
)
from pca_torch.precision import Precision, component_dtype, exact_products, factor_noise, product_dtype
from pca_torch.problem import product_noise
from pca_torch.result import PCAResult
from pca_torch.svd import robust_svd

__all__ = ["solve"]


def solve(
    x: Tensor,
    n_components: float | None = None,
    *,
    weights: Tensor | None = None,
    center: bool = True,
    standardize: bool = False,
    whiten: bool = False,
    ddof: float = 1,
    precision: Precision = "auto",
) -> PCAResult:
    """Principal directions from the samples themselves; D×D is never formed when N < D.

    Args:
        x: finite samples (N, D).
        n_components: K, a share in (0, 1], or None for min(N, D).
        weights: (N,) float64, positive.
        center: subtract the mean.
        standardize: divide each column by its standard deviation.
        whiten: mark the result as whitening and drop directions that are null to rounding.
        ddof: delta degrees of freedom of the divisor.
        precision: arithmetic of the SVD; "auto" is float64 where that is affordable.

    Raises:
        ValueError: too few rows for `ddof`, or `n_components` out of range.
        LinAlgError: every algorithm of `robust_svd` failed; failures before a success are in
            `certificate.fallbacks`.

    Accuracy: backward stable, each singular value is off by a few u·σ₁; see `factor_noise`.
    """
    n = float(len(x))
    total, square = (n, n) if weights is None else (weights.sum().item(), weights.square().sum().item())
    divisor = divisor_of(len(x), total, square, ddof)
    check_count(n_components, *x.shape)
    work = product_dtype(x.dtype, x.device, precision)
    with exact_products(x.device):
        mean, z = _centred(x, weights, center)
        variance = z.square().sum(0) / divisor
        constant = bool(constant_columns(variance, mean).all())
        second_moment = variance * (divisor / (len(x) if weights is None else weights.sum())) + mean.square()
        scale = None
        if standardize:
            scale = standard_deviations(variance, mean)
            z, variance, second_moment = z / scale, variance / scale.square(), second_moment / scale.square()
        s, vh, tried = _factor(z, work)
        spectrum = s.square() / divisor
        relative = factor_noise(len(z), z.shape[1], work)
        error, floor = factor_errors(spectrum, relative)
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
            # of float64 products, whatever the SVD ran in: its residual is that of the samples
            applied_error=(product_noise(len(z)) + product_noise(z.shape[1])) * spectrum[0].item(),
            apply=lambda v: (v @ z.mT @ z) / divisor,
            n_samples=len(x),
            divisor=divisor,
            dtype=x.dtype if x.is_floating_point() else torch.float64,
            constant=constant,
            solver="full",
            precision=f"{str(work).removeprefix('torch.')} SVD of the samples",
            fallbacks=tried,
        )
        return assemble(
            solved,
            n_components,
            dtype=torch.float32 if work == torch.float32 else component_dtype(x.dtype),
            centred=center,
            whiten=whiten,
        )


def _centred(x: Tensor, weights: Tensor | None, center: bool) -> tuple[Tensor, Tensor]:
    """The mean that is subtracted and the rows times √w, in float64.

    Centred twice: after an offset of 10⁴ the first mean is off by its own last digit, which would
    stand in the spectrum as one direction too many.
    """
    z = x.double()
    mean = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    if center:
        share = torch.full((len(x),), 1 / len(x), dtype=torch.float64, device=x.device)
        if weights is not None:
            share = weights / weights.sum()
        for _ in range(2):
            shift = share @ z
            z = z - shift
            mean = mean + shift
    return mean, z if weights is None else z * weights.sqrt()[:, None]


def _factor(z: Tensor, work: torch.dtype) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Singular values (M,) in float64, right vectors (M, D), and what failed on the way to them.

    The longer side goes through QR: U of tall data is never formed, and LAPACK's own way with wide data takes
    two and a half times as long for right vectors and values that are some 50 u off. For a narrower `work`
    the rows are brought to 1 by a power of two, which rounds nothing: float64 values beyond 10³⁸ are infinite
    in float32, below 10⁻⁴⁵ zero.
    """
    unit, wide = 1.0, None
    if work != z.dtype:
        unit = math.ldexp(1.0, math.frexp(z.abs().max().item())[1] - 1)
        z = (z / unit).to(work)
    if len(z) > z.shape[1]:
        z = torch.linalg.qr(z, mode="r").R
    elif len(z) < z.shape[1]:
        wide, r = torch.linalg.qr(z.mT)
        z = r.mT
    s, vh, tried = robust_svd(z)
    if wide is not None:
        vh = vh @ wide.mT.to(vh)
    return s.double() * unit, vh, tuple(f"full: {failure}" for failure in tried)
