"""Many small covariances at once, such as one per head: every answer is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import as_components, as_tensor, check_choice
from pca_torch.jacobi import jacobi_eigh
from pca_torch.linalg import fix_signs
from pca_torch.precision import exact_products, unit_roundoff
from pca_torch.svd import LinAlgError
from pca_torch.threads import side_by_side

__all__ = ["BatchedResult", "decompose_batch"]

SYMMETRIC = 1e-6  # entries may differ from their mirror images by this, relative to the largest one
LOOPED_ABOVE = 32  # torch's batched eigh solves larger matrices one after the other on CUDA


@dataclass(frozen=True, eq=False)  # comparing tensors has no single truth value
class BatchedResult:
    """K principal directions of each of many E×E covariances; `...` are the leading dimensions.

    Everything is float64, or float32 on devices that have no float64.
    """

    components: Tensor  # (..., K, E) unit-free, orthonormal rows, largest entry of each positive
    explained_variance: Tensor  # (..., K) units of the covariance, descending, ≥ 0
    spectrum: Tensor  # (..., E) all variances
    total_variance: Tensor  # (...) trace of each matrix
    variance_error: Tensor  # (...) every |computed - true| variance of the matrix is at most this
    orthonormality: Tensor  # (...) max |VVᵀ - I| over all E directions, measured
    residual: Tensor  # (...) max ‖C v - λ v‖₂ over all E directions, measured
    driver: str  # what solved them, and how many were solved again by another

    @property
    def explained_variance_ratio(self) -> Tensor:
        """(..., K) shares of the total variance of each matrix; zeros where that is zero."""
        total = self.total_variance[..., None]
        return torch.where(total > 0, self.explained_variance / total, 0.0)


@dataclass(frozen=True)
class _Solved:
    """Eigenpairs of B matrices, and what was measured of them."""

    values: Tensor  # (B, E) descending
    rows: Tensor  # (B, E, E)
    orthonormality: Tensor  # (B,)
    residual: Tensor  # (B,)
    error: Tensor  # (B,)
    good: Tensor  # (B,)

    @classmethod
    def joined(cls, parts: Sequence[_Solved]) -> _Solved:
        """The answers of all parts, in their order."""
        columns = ([getattr(part, name) for part in parts] for name in cls.__dataclass_fields__)
        return cls(*(torch.cat(column) for column in columns))

    def replaced(self, at: Tensor, other: _Solved) -> _Solved:
        """With the matrices where `at` (B,) holds taken from `other`."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        return _Solved(*(mine.index_put((at,), theirs) for mine, theirs in pairs))


def decompose_batch(
    covariance: Any,
    n_components: int | None = None,
    *,
    driver: Literal["auto", "eigh", "svd", "jacobi"] = "auto",
) -> BatchedResult:
    """Principal directions of many small covariances in one call.

    Drivers: "eigh" is `torch.linalg.eigh`, which on CUDA solves matrices above 32 × 32 one after the
    other; "svd" is `torch.linalg.svd` (on CUDA its Jacobi, `gesvdj`); "jacobi" is `jacobi_eigh`, batched
    throughout. "auto" takes "jacobi" on CUDA above 32 × 32 and "eigh" elsewhere; on a GPU this choice
    follows from how they work, it is unmeasured. A matrix whose answer is not orthonormal to
    (10 √E + 40) u, or leaves a residual above that times its norm, is solved again by another driver.

    Args:
        covariance: (..., E, E), such as `batch_covariance` makes: symmetric, positive semi-definite up to
            rounding, any real dtype; not changed. Its symmetric part is what is decomposed.
        n_components: K in 0..E, or None for all E.
        driver: "auto", "eigh", "svd" or "jacobi".

    Raises:
        ValueError: not square, not finite, not symmetric, a negative variance, or K out of range.
        LinAlgError: a matrix that no driver solves.

    Accuracy: `variance_error` is ‖CVᵀ - VᵀΛ‖ + 2 ‖VVᵀ - I‖ ‖C‖ (Frobenius; Weyl's theorem for the nearest
        orthonormal V) plus the rounding of that measurement, whose constant grows as the root of E
        (Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019), plus what clamping at zero took away.
    """
    check_choice(driver, "driver", ("auto", "eigh", "svd", "jacobi"))
    given = as_tensor(covariance, "covariance").detach()
    k = _checked_shape(given, n_components)
    shape, e = given.shape[:-2], given.shape[-1]
    with exact_products(given.device):
        c, unit = _scaled(given)
        if driver == "auto":
            driver = "jacobi" if c.is_cuda and e > LOOPED_ABOVE else "eigh"
        solved, used = _solve(c, driver, shape)
        negative = -solved.values[:, -1].clamp_max(0)
        _check_semidefinite(negative, c, given.dtype, shape)
        spectrum = (solved.values.clamp_min(0) * unit).reshape(*shape, e)
        return BatchedResult(
            components=solved.rows[:, :k].reshape(*shape, k, e),
            explained_variance=spectrum[..., :k].clone(),
            spectrum=spectrum,
            total_variance=(c.diagonal(dim1=-2, dim2=-1).sum(-1) * unit[:, 0]).reshape(shape),
            variance_error=((solved.error + negative) * unit[:, 0]).reshape(shape),
            orthonormality=solved.orthonormality.reshape(shape),
            residual=(solved.residual * unit[:, 0]).reshape(shape),
            driver=used,
        )


def _checked_shape(c: Tensor, n_components: int | None) -> int:
    """K.

    Raises:
        ValueError: not square matrices, or K out of range.
    """
    if c.ndim < 2 or c.shape[-1] != c.shape[-2] or not c.shape[-1]:
        raise ValueError(
            f"`covariance` must have shape (..., E, E) with E ≥ 1, got {tuple(c.shape)}; "
            "for samples use `decompose`, or `batch_covariance` first."
        )
    e = c.shape[-1]
    k = as_components(n_components)
    if isinstance(k, float) or (k is not None and k > e):
        raise ValueError(
            f"`n_components` must be an integer in 0..{e} or None, got {n_components!r}; "
            "a share would keep another number of each matrix."
        )
    return e if k is None else k


def _scaled(given: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric parts (B, E, E) over a power of two each, and that power (B, 1).

    With the largest entry in [1, 2) no norm leaves the range of the dtype, and dividing rounds nothing.

    Raises:
        ValueError: NaN, inf, or a matrix that is not symmetric.
    """
    shape = given.shape[:-2]
    parts = side_by_side(_scaled_part, given.reshape(shape.numel(), *given.shape[-2:]))
    c, unit, size, skew = (torch.cat(column) for column in zip(*parts, strict=True))
    _refuse(~size.isfinite(), shape, "must be finite, {} has NaN or inf; leave it out.")
    _refuse(
        skew > SYMMETRIC * (size / unit[:, 0]),
        shape,
        f"must be symmetric to {SYMMETRIC:g} of its largest entry, {{}} is not; pass `(c + c.mT) / 2`.",
    )
    return c, unit


def _scaled_part(given: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Symmetric parts over their units, those units, the largest entries, and how skew they are."""
    c = given.to(torch.float32 if given.device.type == "mps" else torch.float64)
    size = c.abs().amax((-2, -1))
    mantissa = torch.frexp(size).mantissa
    unit = torch.where(size > 0, size / (2 * mantissa), 1.0)[:, None]
    c = c / unit[:, :, None]
    skew = (c - c.mT).abs().amax((-2, -1))
    return (c + c.mT) / 2, unit, size, skew


def _check_semidefinite(negative: Tensor, c: Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
    """Refuse variances below zero by more than the rounding of the entries explains.

    Raises:
        ValueError: there is one.
    """
    u = unit_roundoff(dtype) if dtype.is_floating_point else 0.0
    allowed = SYMMETRIC + c.shape[-1] * u  # entries rounded to u perturb a matrix by E·u at most
    _refuse(
        negative > allowed * torch.linalg.matrix_norm(c),
        shape,
        "must be positive semi-definite, {} has a negative variance; pass a covariance.",
    )


def _refuse(bad: Tensor, shape: torch.Size, sentence: str) -> None:
    """Raise `sentence` about the first matrix where `bad` (B,) holds.

    Raises:
        ValueError: it holds somewhere.
    """
    if bool(bad.any()):
        raise ValueError(f"`covariance` {sentence.format(_named(bad, shape))}")


def _named(bad: Tensor, shape: torch.Size) -> str:
    """The first matrix where `bad` (B,) holds, by its index in the leading dimensions."""
    index = [int(i) for i in torch.unravel_index(bad.int().argmax(), shape)] if shape else []
    return f"matrix {index}" if index else "the matrix"


def _solve(c: Tensor, driver: str, shape: torch.Size) -> tuple[_Solved, str]:
    """Answers that hold, of `driver` or where that fails of the others, and which those were.

    Raises:
        LinAlgError: a matrix that none of them solves.
    """
    solved, used = _attempt(c, driver), driver
    for other in DRIVERS:
        if other == driver or bool(solved.good.all()):
            continue
        bad = ~solved.good
        again = _attempt(c[bad], other)
        solved = solved.replaced(bad, again)
        used += f", {other} for {int(again.good.sum())} of {len(c)}"
    if not bool(solved.good.all()):
        raise LinAlgError(
            f"`covariance`: no driver gives {_named(~solved.good, shape)} orthonormal directions; "
            "check its entries, or leave it out."
        )
    return solved, used


def _attempt(c: Tensor, driver: str) -> _Solved:
    """The answers of one driver, measured."""

    def answers(part: Tensor) -> _Solved:
        with exact_products(part.device):  # in whatever thread
            return _measured(part, driver)

    return _Solved.joined(side_by_side(answers, c))


def _measured(c: Tensor, driver: str) -> _Solved:
    """The answer of one driver, measured; nothing of it is good if the driver gives up."""
    try:
        values, rows = DRIVERS[driver](c)
        rows = fix_signs(rows)
    except LinAlgError:
        values, rows = torch.full_like(c[..., 0], torch.nan), torch.full_like(c, torch.nan)
    u, e = unit_roundoff(c.dtype), c.shape[-1]
    size = torch.linalg.matrix_norm(c)
    gram = rows @ rows.mT
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    lost = torch.linalg.vector_norm(c @ rows.mT - rows.mT * values[:, None, :], dim=-2)  # (B, E)
    orthonormality, residual = gram.abs().amax((-2, -1)), lost.amax(-1)
    limit = (10 * math.sqrt(e) + 40) * u  # seen in 20,000 matrices: 12 √E for E = 4, 6 √E for E = 64
    measured = (4 + math.sqrt(e)) * u * (math.sqrt(e) + 2 * e) * size
    return _Solved(
        values=values,
        rows=rows,
        orthonormality=orthonormality,
        residual=residual,
        error=torch.linalg.vector_norm(lost, dim=-1) + 2 * torch.linalg.matrix_norm(gram) * size + measured,
        good=(orthonormality <= limit) & (residual <= limit * size),  # NaN is neither
    )


def _eigh(c: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(c)
    return values.flip(-1), vectors.mT.flip(-2)


def _svd(c: Tensor) -> tuple[Tensor, Tensor]:
    """A symmetric matrix has |λ| as singular values; its left vectors carry the signs."""
    u, s, vh = torch.linalg.svd(c, driver="gesvdj" if c.is_cuda else None)
    values, rank = (s * (u.mT * vh).sum(-1).sign()).sort(-1, descending=True)
    return values, vh.gather(-2, rank[..., None].expand(vh.shape))


DRIVERS = {"eigh": _eigh, "svd": _svd, "jacobi": jacobi_eigh}
