"""Singular values and right vectors by the first of several algorithms whose answer can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from pca_torch.precision import exact_arithmetic, unit_roundoff

__all__ = ["robust_svd"]

LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
LARGEST = 23169  # of the smaller side: beyond, the 4M² work numbers of `gesdd` overflow 32 bits
ORTHONORMAL = 10.0  # |VVᵀ - I| over u·max(N, D); LAPACK's own tests pass up to 100, correct answers show 2


def robust_svd(a: Tensor) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Singular values and right singular vectors of `a`, and what failed before they were found.

    The first answer that is finite with orthonormal vectors is taken. On CUDA: the one-sided Jacobi
    `gesvdj`, the QR iteration `gesvd`, then float64 there and on the CPU. Elsewhere: divide and conquer
    (`gesdd`), the same in float64, then `gesvd` where SciPy is installed. The approximate `gesvda`
    is never used.

    Args:
        a: finite (N, D), float32 or float64; not changed.

    Returns:
        Singular values (M,), descending, M = min(N, D); right vectors (M, D) as rows, both on the device
        of `a`, in its dtype or in float64 if that was needed; and one short sentence per failure.

    Raises:
        ValueError: `a` has NaN or inf, or is beyond LAPACK.
        LinAlgError: no algorithm found an answer.
        RuntimeError: it failed for another reason than numbers, such as memory.

    Accuracy: backward stable, σ is off by a few u·σ₁ and |VVᵀ - I| ≤ 10·u·max(N, D).
    Source: Anderson et al., LAPACK Users' Guide, 1999, §2.4.6 and §4.9.
    """
    if not bool(a.isfinite().all()):
        raise ValueError("`a` must be finite, got NaN or inf; drop those rows before the decomposition.")
    if min(a.shape) > LARGEST and not a.is_cuda:
        raise ValueError(
            f"an SVD of {len(a)} × {a.shape[1]} is beyond LAPACK's {LARGEST}; "
            "ask for few components and `svd_solver='krylov'`."
        )
    tried: list[str] = []
    with exact_arithmetic(a.device):
        for name, attempt in _algorithms(a):
            try:
                s, vh = attempt()
            except RuntimeError as error:
                if not _is_numerical(error):
                    raise
                tried.append(f"{name}: {(str(error).splitlines() or ['no reason given'])[0]}")
                continue
            fault = _fault(s, vh, max(a.shape))
            if fault is None:
                return s.to(a.device), vh.to(a.device), tuple(tried)
            tried.append(f"{name}: {fault}")
    raise LinAlgError(
        f"no SVD of the {len(a)} × {a.shape[1]} matrix succeeded ({'; '.join(tried)}); "
        "use `svd_solver='covariance_eigh'`."
    )


def _algorithms(a: Tensor) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor]]]]:
    """Names and calls, in the order in which they are tried."""
    if a.is_cuda:
        yield "gesvdj", lambda: _torch(a, "gesvdj")
        yield "gesvd", lambda: _torch(a, "gesvd")
        yield "float64", lambda: _torch(a.double())
        yield "float64 on the CPU", lambda: _torch(a.cpu().double())
        return
    yield "gesdd", lambda: _torch(a)
    if a.dtype != torch.float64:
        yield "gesdd in float64", lambda: _torch(a.cpu().double())
    if find_spec("scipy"):
        yield "gesvd in float64", lambda: _scipy(a.cpu().double())


def _torch(a: Tensor, driver: str | None = None) -> tuple[Tensor, Tensor]:
    _, s, vh = torch.linalg.svd(a, full_matrices=False, driver=driver)
    return s, vh


def _scipy(a: Tensor) -> tuple[Tensor, Tensor]:
    """LAPACK's QR iteration: slower than divide and conquer, and it converges where that does not.

    Raises:
        LinAlgError: it did not converge.
    """
    import numpy as np
    import scipy.linalg

    try:
        _, s, vh = scipy.linalg.svd(a.numpy(), full_matrices=False, lapack_driver="gesvd")
    except np.linalg.LinAlgError as error:
        raise LinAlgError(str(error)) from error
    return torch.from_numpy(s), torch.from_numpy(vh)


def _is_numerical(error: RuntimeError) -> bool:
    """Whether another algorithm may do better: it will not where memory ran out or an argument is wrong."""
    if isinstance(error, LinAlgError):
        return True
    text = str(error).lower()
    return ("converge" in text or "cusolver" in text) and "alloc" not in text and "memory" not in text


def _fault(s: Tensor, vh: Tensor, size: int) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if not bool(s.isfinite().all() & vh.isfinite().all()):
        return "NaN or inf in the answer"
    gram = vh @ vh.mT
    gram.diagonal().sub_(1)
    off = gram.abs().max().item() if len(gram) else 0.0
    if off > ORTHONORMAL * unit_roundoff(vh.dtype) * size:
        return f"vectors orthonormal to {off:.1e} only"
    return None
