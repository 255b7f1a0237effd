"""The table of solvers, the choice between them, and `decompose`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import (
    as_components,
    as_mask,
    as_rows,
    as_weights,
    check_choice,
    check_ddof,
    select_rows,
)
from pca_torch.moments import Moments
from pca_torch.precision import Precision
from pca_torch.result import PCAResult
from pca_torch.solvers import covariance, full
from pca_torch.sources import NpySource

__all__ = ["SOLVERS", "choose_solver", "decompose"]

SOLVERS = {"full": full.solve, "covariance_eigh": covariance.solve}
SMALL = 3e8  # N·D·min(N, D) up to which the SVD of the samples takes a fraction of a second


def choose_solver(
    n: int,
    d: int,
    k: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> str:
    """The solver that `svd_solver="auto"` takes for samples in memory, without computing anything.

    | N, D                          | choice            | why                                          |
    |-------------------------------|-------------------|----------------------------------------------|
    | N ≤ D                         | `full`            | D×D is never formed                          |
    | N·D·min(N, D) ≤ 3e8           | `full`            | takes a moment and keeps every variance      |
    | otherwise                     | `covariance_eigh` | one pass, then D³; a statistic or a source   |
    |                               |                   | on disk always goes this way                 |

    For float64 data `decompose` turns to `full` by itself when components below the floor of
    `covariance_eigh` were asked for.

    Args:
        n: samples.
        d: features.
        k: components, a share, or None; every solver of today computes all of them.
        dtype: of the data.
        device: of the data.
    """
    del k, dtype, device
    return "full" if n <= d or n * d * min(n, d) <= SMALL else "covariance_eigh"


def decompose(
    data: Tensor | Moments | NpySource | Sequence[NpySource] | Any,
    n_components: float | None = None,
    svd_solver: str = "auto",
    *,
    mask: Any = None,
    weights: Any = None,
    center: bool = True,
    standardize: bool = False,
    whiten: bool = False,
    ddof: float = 1,
    precision: Precision = "auto",
    nonfinite: Literal["raise", "drop"] = "raise",
) -> PCAResult:
    """Principal directions of data in memory, on disk, or of a statistic.

    Args:
        data: samples (..., D), a `Moments`, or one or several `NpySource`.
        n_components: K, a share of the variance in (0, 1], or None for min(N, D).
        svd_solver: "auto" or one of `SOLVERS`.
        mask: 0/1 with the leading shape of the samples.
        weights: importance ≥ 0 of each sample, same shape.
        center: subtract the mean.
        standardize: divide each column by its standard deviation.
        whiten: scores of `transform` have unit variance; null directions are dropped.
        ddof: delta degrees of freedom.
        precision: arithmetic of the products.
        nonfinite: "raise" or "drop" samples with NaN or inf.

    Raises:
        ValueError: bad data or arguments, each with what is allowed.
    """
    check_choice(svd_solver, "svd_solver", ("auto", *SOLVERS))
    check_choice(nonfinite, "nonfinite", ("raise", "drop"))
    check_ddof(ddof)
    n_components = as_components(n_components)
    options = {"center": center, "standardize": standardize, "whiten": whiten, "ddof": ddof}
    if isinstance(data, NpySource):
        data = [data]
    if isinstance(data, (list, tuple)) and data and all(isinstance(source, NpySource) for source in data):
        data = _summed(data, precision, nonfinite)
    if isinstance(data, Moments) and (mask is not None or weights is not None):
        raise ValueError("`mask` and `weights` are for samples in memory; give them to `Moments.update`.")
    if isinstance(data, Moments):
        return _of_statistic(data, n_components, svd_solver, options)
    rows, shape = as_rows(data)
    with torch.no_grad():
        where = as_mask(mask, shape, rows.device), as_weights(weights, shape, rows.device)
        rows, w, _ = select_rows(rows.detach(), *where, nonfinite)
        return _of_samples(rows, w, n_components, svd_solver, precision, options)


def _summed(
    sources: Sequence[NpySource], precision: Precision, nonfinite: Literal["raise", "drop"]
) -> Moments:
    """One pass over arrays on disk.

    Raises:
        ValueError: a file has NaN or inf, or another D.
    """
    moments = Moments(sources[0].n_features, precision=precision, nonfinite=nonfinite)
    for source in sources:
        for block in source:
            try:
                moments.update(block)
            except ValueError as error:
                raise ValueError(f"{source.path}: {error}") from error
    return moments


def _of_statistic(moments: Moments, n_components: Any, svd_solver: str, options: dict[str, Any]) -> PCAResult:
    """Solve a statistic, whose samples are gone.

    Raises:
        ValueError: the solver needs the samples.
    """
    if svd_solver not in {"auto", "covariance_eigh"}:
        raise ValueError(
            f"`svd_solver` = {svd_solver!r} needs the samples, a statistic keeps their scatter; "
            "use 'covariance_eigh' or 'auto'."
        )
    return covariance.solve(moments, n_components, **options)


def _of_samples(
    rows: Tensor,
    w: Tensor | None,
    n_components: Any,
    svd_solver: str,
    precision: Precision,
    options: dict[str, Any],
) -> PCAResult:
    """Solve samples in memory; "auto" looks again where the covariance did not reach."""
    n, d = rows.shape
    chosen = (
        choose_solver(n, d, n_components, rows.dtype, rows.device) if svd_solver == "auto" else svd_solver
    )
    if chosen == "full":
        return full.solve(rows, n_components, weights=w, precision=precision, **options)
    moments = Moments(d, precision=precision).update(rows, weights=w)
    result = covariance.solve(moments, n_components, **options)
    trusted = result.certificate.trusted
    asked = min(n, d) if n_components is None else n_components
    asked = result.n_components if isinstance(asked, float) else asked  # whitening may have cut it
    if svd_solver != "auto" or rows.dtype != torch.float64 or asked <= trusted:
        return result
    again = full.solve(rows, n_components, weights=w, precision=precision, **options)
    tried = (
        f"covariance_eigh: {asked} components asked for, "
        f"{trusted} stand above its floor {result.certificate.rounding_floor:.3g}"
    )
    return replace(again, certificate=replace(again.certificate, fallbacks=(tried,)))
