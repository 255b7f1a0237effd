"""Eigenpairs of a symmetric matrix, all of them or the leading ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pca_torch.threads import SMALL, one_thread

__all__ = ["eigenpairs", "leading_rows", "small_eigh", "small_eigvalsh", "subset_solver", "values_of"]

SUBSET_FROM = 512  # rows below which all vectors cost no more than some
# LAPACK reads the upper triangle of the transpose in place
EVR: dict[str, Any] = {"driver": "evr", "lower": False, "check_finite": False}


def eigenpairs(matrix: Tensor, choose: Callable[[Tensor], int] | None = None) -> tuple[Tensor, Tensor]:
    """All eigenvalues (D,) of a symmetric matrix, descending, and the leading eigenvectors as rows.

    Values come first where not all vectors are wanted: SciPy's `evr` driver (Dhillon, Parlett & Vömel,
    ACM TOMS 32(4), 2006) then works out the wanted ones alone, in a third of the time.

    Args:
        matrix: (D, D) float64; its lower triangle counts.
        choose: how many vectors are wanted, given the values; None is all.

    Returns:
        Values (D,) and K or more vectors (K…, D).
    """
    d, scipy = len(matrix), _scipy_linalg()
    if scipy is None or d <= SUBSET_FROM or matrix.device.type != "cpu":
        values, vectors = torch.linalg.eigh(matrix)
        return values.flip(0), vectors.mT.flip(0)
    # LAPACK reads the upper triangle of the transpose in place
    solve = partial(scipy.eigh, matrix.numpy().T, lower=False, check_finite=False)
    if choose is not None:
        values = torch.linalg.eigvalsh(matrix).flip(0)
        k = choose(values.clamp_min(0))
        if k == 0:
            return values, matrix.new_zeros(0, d)
        if k <= d // 2:
            _, vectors = solve(subset_by_index=[d - k, d - 1], driver="evr")
            return values, torch.from_numpy(vectors).mT.flip(0)
    values, vectors = solve(driver="evd")  # two thirds of the time of torch's call of the same routine
    return torch.from_numpy(values).flip(0), torch.from_numpy(vectors).mT.flip(0)


def subset_solver(matrix: Tensor) -> bool:
    """Whether SciPy's solver for some of the eigenvectors is there for this matrix.

    Args:
        matrix: on any device.
    """
    return matrix.device.type == "cpu" and _scipy_linalg() is not None


def values_of(matrix: Tensor) -> Tensor:
    """(D,) eigenvalues of a symmetric matrix on the CPU, descending, in its dtype, by SciPy.

    Args:
        matrix: (D, D); its lower triangle counts.
    """
    import scipy.linalg  # optional: `subset_solver` says whether it is there

    return torch.from_numpy(scipy.linalg.eigh(matrix.numpy().T, eigvals_only=True, **EVR)).flip(0)


def leading_rows(matrix: Tensor, k: int) -> Tensor:
    """(K, D) leading eigenvectors of a symmetric matrix on the CPU as rows, in its dtype, by SciPy.

    Args:
        matrix: (D, D); its lower triangle counts.
        k: K ≥ 1.
    """
    import scipy.linalg

    d = len(matrix)
    _, vectors = scipy.linalg.eigh(matrix.numpy().T, subset_by_index=[d - k, d - 1], **EVR)
    return torch.from_numpy(vectors).mT.flip(0)


def small_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.eigh` of a matrix that is mostly small: a CPU takes milliseconds, and one thread.

    A GPU would take longer for up to 512 rows, by what such calls cost there; that is unmeasured.

    Args:
        matrix: (m, m) symmetric, on any device.

    Returns:
        Values (m,), ascending, and eigenvectors (m, m) as columns, on the device of `matrix`.
    """
    with one_thread(len(matrix)):
        values, vectors = torch.linalg.eigh(_where_fast(matrix))
    return values.to(matrix.device), vectors.to(matrix.device)


def small_eigvalsh(matrix: Tensor) -> Tensor:
    """The values (m,) of `small_eigh` alone, ascending, on the CPU where it is small.

    Args:
        matrix: (m, m) symmetric, on any device.
    """
    with one_thread(len(matrix)):
        return torch.linalg.eigvalsh(_where_fast(matrix))


def _where_fast(matrix: Tensor) -> Tensor:
    return matrix.cpu() if len(matrix) <= SMALL else matrix


def _scipy_linalg() -> ModuleType | None:
    try:
        import scipy.linalg  # optional
    except ImportError:
        return None
    return scipy.linalg
