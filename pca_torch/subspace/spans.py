"""Principal angles and the overlap of two subspaces, each the span of some rows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import as_tensor, check_choice, check_number, check_whole
from pca_torch.precision import exact_products, unit_roundoff
from pca_torch.result import PCAResult
from pca_torch.svd import robust_svd

__all__ = ["angles_between", "orthonormal_rows", "overlap", "principal_angles"]


def orthonormal_rows(
    basis: PCAResult | Any, k: int | None = None, *, rtol: float | None = None, name: str = "basis"
) -> Tensor:
    """Orthonormal rows with the span of `basis`, as many as it has dimensions.

    The rank comes first: an SVD of zeros hands out orthonormal vectors too, and an adapter that was never
    trained has no span. What lies below the rounding of the entries, 2u‖A‖_F in their dtype, or below that
    of the SVD is no direction.

    Args:
        basis: rows (K, D) or one row (D,), of any length and angle; or a `PCAResult`, of which those
            components count whose variance stands above its rounding floor.
        k: only the leading rows, this many.
        rtol: directions at or below this share of the largest singular value do not count, instead of those
            at or below rounding.
        name: how errors call `basis`.

    Returns:
        (R, D) float64, R ≤ K; R is 0 where all rows are zero.

    Raises:
        ValueError: NaN or inf, no features, more than two dimensions, or fewer rows than `k`.
    """
    if isinstance(basis, PCAResult):
        rows, most = basis.components.detach(), basis.certificate.trusted
    else:
        rows, most = _as_matrix(basis, name), None
    if k is not None:
        check_whole(k, "k", 0)
        if k > len(rows):
            raise ValueError(f"`k` must be in 0..{len(rows)}, the rows of `{name}`, got {k}.")
        rows = rows[:k]
    if rtol is not None:
        check_number(rtol, "rtol", "a number in [0, 1)", 0 <= rtol < 1)
    with exact_products(rows.device):
        if most is not None:  # orthonormal but for their rounding: nothing to decide
            return torch.linalg.qr(rows[:most].double().mT).Q.mT
        return _leading_directions(rows, rtol)


def principal_angles(a: PCAResult | Any, b: PCAResult | Any, *, rtol: float | None = None) -> Tensor:
    """Angles between the spans of `a` and `b`, from the closest pair of directions to the farthest.

    The cosines are the singular values of QₐQ_bᵀ, the sines those of what Q_b leaves of Qₐ. Both are off by a
    few u, and so is the angle of the two together, where the arc cosine alone loses all angles below √u.

    Args:
        a: rows (K, D), one row (D,), or a `PCAResult`; see `orthonormal_rows`.
        b: the other, with the same D.
        rtol: share of the largest singular value that is no direction; None is what rounding explains.

    Returns:
        (min(Rₐ, R_b),) float64 radians in [0, π/2], ascending; none where a span has no dimension.

    Raises:
        ValueError: another D, NaN or inf, or no rows by columns.

    Source: Björck & Golub, Math. Comp. 27(123), 1973; Knyazev & Argentati, SIAM J. Sci. Comput. 23(6), 2002.
    """
    return angles_between(*_both(a, b, rtol))


def overlap(
    a: PCAResult | Any,
    b: PCAResult | Any,
    normalise: Literal["min", "max"] = "min",
    *,
    rtol: float | None = None,
) -> float:
    """‖QₐQ_bᵀ‖_F² over the smaller dimension: the mean squared cosine of the principal angles.

    1 is the same span, or one inside the other; "max" is 1 for the same span alone. Random spans do not give
    0 but what `random_overlap` says. A span without dimensions overlaps with nothing: 0.

    Args:
        a: rows (K, D), one row (D,), or a `PCAResult`; see `orthonormal_rows`.
        b: the other, with the same D.
        normalise: over the smaller ("min") or the larger ("max") of the two dimensions.
        rtol: share of the largest singular value that is no direction; None is what rounding explains.

    Raises:
        ValueError: another D, NaN or inf, or another `normalise`.

    Source: Hu et al., LoRA, 2021, §7.2.
    """
    check_choice(normalise, "normalise", ("min", "max"))
    first, second = _both(a, b, rtol)
    sizes = len(first), len(second)
    if not min(sizes):
        return 0.0
    with exact_products(first.device):
        total = (first @ second.mT).square().sum().item()
    return min(1.0, total / (min(sizes) if normalise == "min" else max(sizes)))


def angles_between(first: Tensor, second: Tensor) -> Tensor:
    """`principal_angles` of rows that are orthonormal, unchecked.

    Args:
        first: (Rₐ, D) float64.
        second: (R_b, D) float64, on the same device.
    """
    small, large = (first, second) if len(first) <= len(second) else (second, first)
    if not len(small):
        return small.new_zeros(0)
    with exact_products(small.device):
        inner = small @ large.mT
        cosines = torch.linalg.svdvals(inner)  # descending, so that the angles ascend
        sines = torch.linalg.svdvals(small - inner @ large).flip(0)
        return torch.atan2(sines, cosines)


def _as_matrix(basis: Any, name: str) -> Tensor:
    """Rows (K, D), with their dtype.

    Raises:
        ValueError: another number of dimensions, no features, NaN or inf.
    """
    rows = as_tensor(basis, name).detach()
    rows = rows[None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or not rows.shape[1]:
        raise ValueError(f"`{name}` must be rows (K, D) with D ≥ 1, got shape {tuple(rows.shape)}.")
    bad = len(rows) - int(rows.isfinite().all(1).sum())
    if bad:
        raise ValueError(f"`{name}` must be finite, got {bad} of {len(rows)} rows with NaN or inf.")
    return rows


def _both(a: PCAResult | Any, b: PCAResult | Any, rtol: float | None) -> tuple[Tensor, Tensor]:
    """Orthonormal rows of both, on the device of the first.

    Raises:
        ValueError: they have another D.
    """
    first, second = (orthonormal_rows(basis, rtol=rtol, name=name) for name, basis in (("a", a), ("b", b)))
    if first.shape[1] != second.shape[1]:
        raise ValueError(
            f"`a` and `b` must have the same features, got {first.shape[1]} and {second.shape[1]}; "
            "directions are rows."
        )
    return first, second.to(first.device)


def _leading_directions(rows: Tensor, rtol: float | None) -> Tensor:
    size = rows.abs().amax().double() if rows.numel() else rows.new_zeros((), dtype=torch.float64)
    if size == 0:
        return rows.new_zeros(0, rows.shape[1], dtype=torch.float64)
    scaled = rows.double() / size  # squares of very long or short rows would leave the range of float64
    s, vh, _ = robust_svd(scaled)
    if rtol is None:
        stored = unit_roundoff(rows.dtype) if rows.is_floating_point() else 0.0
        floor = 2 * stored * torch.linalg.vector_norm(scaled)
        floor = floor + max(rows.shape) * torch.finfo(torch.float64).eps * s[0]
    else:
        floor = rtol * s[0]
    return vh[: int((s > floor).sum())]
