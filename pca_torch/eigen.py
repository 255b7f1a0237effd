"""Eigenpairs of a symmetric matrix, all of them or the leading ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["eigenpairs", "one_thread"]

SUBSET_FROM = 512  # rows below which all vectors cost no more than some


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


@contextmanager
def one_thread(rows: int) -> Generator[None]:
    """An eigenproblem of so many rows inside runs on one thread, if it is small.

    Threaded LAPACK waits for busy cores: two milliseconds of work on 200 rows then take half a second.

    Args:
        rows: of the matrix.
    """
    if rows > SUBSET_FROM:
        yield
        return
    _enter_one()
    try:
        yield
    finally:
        _leave_one()


class _Threads:
    """Who runs on one thread now, and how many there were before: two fits may overlap."""

    lock = threading.Lock()
    inside = 0
    before = 1


def _enter_one() -> None:
    with _Threads.lock:
        if not _Threads.inside:
            _Threads.before = torch.get_num_threads()
        _Threads.inside += 1
        torch.set_num_threads(1)


def _leave_one() -> None:
    with _Threads.lock:
        _Threads.inside -= 1
        if not _Threads.inside:
            torch.set_num_threads(_Threads.before)


def _scipy_linalg() -> ModuleType | None:
    try:
        import scipy.linalg  # optional
    except ImportError:
        return None
    return scipy.linalg
