"""`covariance_eigh`: the eigenproblem of the centred scatter. Fast for many samples; squares κ."""

from __future__ import annotations

import torch
from torch import Tensor

from pca_torch.bounds import Solved, assemble, check_count, kept
from pca_torch.eigen import eigenpairs
from pca_torch.moments import Moments
from pca_torch.operators import Dense, from_moments
from pca_torch.precision import component_dtype, exact_products, unit_roundoff
from pca_torch.result import PCAResult

__all__ = ["solve", "whole"]

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
    """Principal directions from the scatter of a statistic, with every variance.

    Args:
        moments: the statistic; it may go on afterwards, nothing is shared.
        n_components: K, a share in (0, 1], or None for min(N, D).
        center: subtract the mean; without it the second moment is decomposed.
        standardize: decompose the correlation matrix.
        whiten: mark the result as whitening and drop directions that are null to rounding.
        ddof: delta degrees of freedom of the divisor.

    Raises:
        ValueError: too few rows for `ddof`, or `n_components` out of range.

    Accuracy: every variance is off by at most ‖E‖ + (D + 8)u·λ₁, so those below √u·σ₁ are lost where
    an SVD of the samples keeps them: κ(XᵀX) = κ(X)².
    """
    with exact_products(moments.mean.device):
        op = from_moments(moments, center=center, standardize=standardize, ddof=ddof)
        check_count(n_components, op.problem.n_samples, len(op.problem.mean))
        solved = whole(op, n_components)
        dtype = component_dtype(solved.dtype)
        return assemble(solved, n_components, dtype=dtype, centred=center, whiten=whiten)


def whole(op: Dense, n_components: float | None = None, fallbacks: tuple[str, ...] = ()) -> Solved:
    """All variances of a covariance that was formed, and as many directions as are asked for.

    Args:
        op: the covariance.
        n_components: K, a share in (0, 1], or None.
        fallbacks: what was tried before.
    """
    problem = op.problem
    most = min(problem.n_samples, len(problem.mean))

    def errors(values: Tensor) -> float:
        return problem.error + (len(problem.mean) + 8) * U64 * values[0].item()

    def wanted(values: Tensor) -> int:
        off = torch.full_like(values[:most], errors(values))
        return kept(n_components, values[:most], problem.total_variance, errors(values), off)

    all_of_them = n_components is None or problem.constant
    values, vectors = eigenpairs(op.matrix, None if all_of_them else wanted)
    off = errors(values)
    return Solved(
        mean=problem.mean,
        scale=problem.scale,
        spectrum=values[:most],
        directions=vectors[:most],
        total_variance=problem.variance.sum(),
        second_moment=problem.second_moment,
        error=torch.full_like(values[:most], off),
        floor=off,
        perturbation=off,
        apply=op.apply,
        n_samples=problem.n_samples,
        divisor=problem.divisor,
        dtype=problem.dtype,
        constant=problem.constant,
        solver="covariance_eigh",
        precision=f"{problem.products} products, float64 sums and eigh",
        bound_kind="measured" if problem.measured else "deterministic",
        fallbacks=fallbacks,
    )
