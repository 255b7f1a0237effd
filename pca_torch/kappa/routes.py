"""The smallest variances of samples by every route, raw, beside the truth and each certificate."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pca_torch._checks import as_rows, check_whole, free_memory, select_rows
from pca_torch.kappa.shifts import OFFSETS, Shift, shifted
from pca_torch.kappa.squared import SQUARING
from pca_torch.kappa.truth import exact_variances
from pca_torch.moments import Moments
from pca_torch.operators import from_moments
from pca_torch.precision import Precision
from pca_torch.result import Certificate
from pca_torch.rfactor import RFactor
from pca_torch.solvers import full, tsqr
from pca_torch.sources import NpySource
from pca_torch.threads import one_thread

__all__ = ["MOST_FEATURES", "STEPS", "Route", "Study", "example", "read", "study"]

PRECISIONS: tuple[Precision, ...] = ("float32", "float64")
METHODS = (*SQUARING, "SVD", "TSQR")
STEPS = len(PRECISIONS) * (len(METHODS) + len(OFFSETS))  # what `progress` is told of
MOST_FEATURES = 2048  # some twenty decompositions, of seconds each
COPIES = 6  # of the samples in float64, alive at once
COUNT = 5
RIGHT = 0.1  # of the truth: a variance that is off by more is lost


@dataclass(frozen=True)
class Route:
    """What one route made of the samples: numbers before any clamp, and what its certificate says."""

    precision: str  # of the products or of the factorisation
    method: str
    variances: tuple[float, ...]  # the last ones, activation units squared; negative ones as they came
    relative_errors: tuple[float | None, ...]  # |computed - true| / true; None where the truth is zero
    variance_error: tuple[float, ...]  # what the certificate says that each is off by at most
    rounding_floor: float  # of the certificate
    trusted: int  # leading variances that the certificate calls trusted
    right: int  # leading variances that are within a tenth of the truth, as far as that is known
    solver: str
    arithmetic: str  # of products, sums and factorisations, in words


@dataclass(frozen=True)
class Study:
    """The variances λ_first … λ_last of N samples with D features, divisor N, by every route."""

    name: str
    n_samples: int  # N
    n_features: int  # D
    first: int  # index of the first variance shown, from 1
    last: int  # min(N - 1, D), beyond which centred samples have none
    truth: tuple[float, ...]  # activation units squared
    truth_error: tuple[float, ...]  # what the truth may be off by; zeros where it is exact
    truth_digits: int | None  # of the exact arithmetic; None is the float64 SVD
    largest: float  # λ₁
    kappa: float | None  # σ₁/σ_last of the centred samples; None where λ_last is not told from zero
    routes: tuple[Route, ...]
    shifts: tuple[Shift, ...]

    @property
    def condition(self) -> str:
        """κ(X) and its square in words."""
        if self.kappa is not None:
            return f"κ(X) = {self.kappa:.2e}, κ(X)² = {self.kappa * self.kappa:.2e}"
        doubt = self.truth[-1] + self.truth_error[-1]
        if doubt == 0:
            return f"κ(X) is infinite: λ{self.last} is zero"
        least = math.sqrt(self.largest / doubt)
        return f"κ(X) ≥ {least:.1e}: float64 cannot tell λ{self.last} from zero"

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types."""
        return _listed(asdict(self)) | {"version": 1}


def example() -> Tensor:
    """The built-in samples (200, 5) in float64, whose singular values fall from 1 to 1e-8."""
    stored = files("pca_torch.kappa").joinpath("matrix.npy").read_bytes()
    return torch.from_numpy(np.load(io.BytesIO(stored), allow_pickle=False))


def read(path: str | Path) -> Tensor:
    """The samples (N, D) of a `.npy` file, in their own dtype.

    Args:
        path: the file, of shape (..., D).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no array of real numbers, or too large for a study.
    """
    source = NpySource(path)
    try:
        _check_size(source.n_rows, source.n_features)
        return torch.cat([as_rows(block)[0].clone() for block in source])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def study(
    x: Any = None,
    *,
    count: int = COUNT,
    name: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> Study:
    """The smallest variances by every route, beside the true ones.

    Routes are float32 and float64, each by the covariance, block Lanczos on the covariance, the SVD of the
    samples, and the SVD of their triangular factor, on one thread up to 512 features. All see the samples as
    given, in float64: the float32 ones round them on the way, after centring, and what that costs is a part
    of their error.

    Args:
        x: samples (..., D); None is `example()`. They are studied on the CPU.
        count: how many of the smallest variances are shown.
        name: what the samples are called.
        progress: told of each of the `STEPS` as it is done.

    Returns:
        The study. The truth is exact to the last digit up to 16 features and four million products of two
        entries, N·D·(D + 1)/2; beyond that it is the float64 SVD with its error bound.

    Raises:
        ValueError: fewer than two samples, NaN or inf, samples that do not vary, more than 2048 features, or
            a `count` out of range.
        TypeError: no real numbers.
    """
    check_whole(count, "count", 1)
    title = str(name or ("built-in matrix" if x is None else "samples"))
    rows, _ = as_rows(example() if x is None else x)
    _check_size(*rows.shape)
    rows = select_rows(rows.detach(), None, None, "raise")[0].cpu().double()
    told = progress or (lambda _: None)
    n, d = rows.shape
    k = min(n - 1, d)
    shown = slice(max(0, k - count), k)
    with one_thread(d), torch.no_grad():
        _check_varies(rows)
        truth = _truth(rows, k)
        routes = []
        for precision in PRECISIONS:
            for method in METHODS:
                routes.append(_route(rows, shown, method, precision, truth))
                told(1)
        shifts = shifted(rows, told)
    largest, smallest = truth.values[0], truth.values[-1]
    return Study(
        name=title,
        n_samples=n,
        n_features=d,
        first=shown.start + 1,
        last=k,
        truth=truth.values[shown],
        truth_error=truth.error[shown],
        truth_digits=truth.digits,
        largest=largest,
        kappa=math.sqrt(largest) / math.sqrt(smallest) if smallest > truth.error[-1] else None,
        routes=tuple(routes),
        shifts=shifts,
    )


def _check_size(n: int, d: int) -> None:
    """Refuse samples that are too few or too many, before they are copied.

    Raises:
        ValueError: which, and what to do.
    """
    if n < 2:
        raise ValueError(f"`x` must hold at least 2 samples, got {n}; one alone has no variance.")
    if d > MOST_FEATURES:
        raise ValueError(
            f"`x` must have at most {MOST_FEATURES} features for a study, got {d}; pass some of the columns."
        )
    need, free = 8 * COPIES * n * d, free_memory(torch.device("cpu"))
    if free is not None and need > free:
        raise ValueError(
            f"`x` of {n} samples with {d} features needs {need / 2**30:,.1f} GiB for this study, "
            f"{free / 2**30:,.1f} GiB is free; pass some of the samples."
        )


def _check_varies(rows: Tensor) -> None:
    """Refuse samples without variance.

    Raises:
        ValueError: no column varies by more than the rounding of its mean.
    """
    if from_moments(Moments(rows.shape[1]).update(rows), ddof=0).problem.constant:
        raise ValueError("`x` does not vary: all samples are the same to rounding; pass others.")


@dataclass(frozen=True)
class _Truth:
    """The K variances that are judged by."""

    values: tuple[float, ...]
    error: tuple[float, ...]
    digits: int | None


def _truth(rows: Tensor, k: int) -> _Truth:
    """Exact where that is affordable, else the float64 SVD with its bounds."""
    exact = exact_variances(rows)
    if exact is not None:
        return _Truth(exact[0][:k], (0.0,) * k, exact[1])
    result = full.solve(rows, k, precision="float64", ddof=0)
    return _Truth(tuple(result.explained_variance.tolist()), result.certificate.variance_error, None)


def _route(rows: Tensor, shown: slice, method: str, precision: Precision, truth: _Truth) -> Route:
    """One route: raw variances and the certificate of one and the same run."""
    k = len(truth.values)
    raw, certificate = _solve(rows, k, method, precision)
    values = raw.tolist()
    off = [
        abs(value - true) / true if true > 0 else None
        for value, true in zip(values, truth.values, strict=True)
    ]
    known = [error <= RIGHT * true for error, true in zip(truth.error, truth.values, strict=True)]
    right = [error is not None and error <= RIGHT and sure for error, sure in zip(off, known, strict=True)]
    return Route(
        precision=precision,
        method=method,
        variances=tuple(values[shown]),
        relative_errors=tuple(off[shown]),
        variance_error=certificate.variance_error[shown],
        rounding_floor=certificate.rounding_floor,
        trusted=min(k, certificate.trusted),
        right=[*right, False].index(False),
        solver=certificate.solver,
        arithmetic=certificate.precision,
    )


def _solve(rows: Tensor, k: int, method: str, precision: Precision) -> tuple[Tensor, Certificate]:
    """(K,) variances before any clamp, and the certificate."""
    d = rows.shape[1]
    if method in SQUARING:
        op = from_moments(Moments(d, precision=precision).update(rows), ddof=0)
        return SQUARING[method](op, k)
    if method == "SVD":
        result = full.solve(rows, k, precision=precision, ddof=0)
    else:
        result = tsqr.solve(RFactor(d, precision=precision).update(rows), k, ddof=0)
    return result.explained_variance, result.certificate  # squares: never negative, never clamped


def _listed(value: Any) -> Any:
    """`value` with lists for its tuples."""
    if isinstance(value, dict):
        return {key: _listed(inner) for key, inner in value.items()}
    return [_listed(inner) for inner in value] if isinstance(value, tuple) else value
