"""`randomized`: the leading directions in a random sketch of the samples, with a bound on what it missed."""

from __future__ import annotations

import torch
from torch import Tensor

from pca_torch._checks import as_components, check_positive, check_whole, free_memory
from pca_torch.bounds import Solved, assemble, check_count, kept
from pca_torch.complement import probe, trace_bound
from pca_torch.linalg import gaussian, generator_from
from pca_torch.operators import Rows, Sparse
from pca_torch.precision import component_dtype, exact_products
from pca_torch.result import PCAResult
from pca_torch.ritz import Ritz, finish, rayleigh_ritz, upper_values

__all__ = ["range_finder", "solve"]

PROBE_PRODUCTS = 10  # a bound 12 % above what is there; more would cost more than the sketch
FIRST_SKETCH = 32  # directions among which a share is looked for first


def solve(
    rows: Rows | Sparse,
    n_components: float | None = None,
    *,
    n_oversamples: int = 10,
    n_iter: int = 4,
    random_state: int | torch.Generator | None = None,
    whiten: bool = False,
    tol: float | None = None,
) -> PCAResult:
    """The leading directions within the range of a few random combinations of the samples.

    Quick, and exact where the variances fall fast; otherwise the certificate says how much was missed.

    Args:
        rows: the samples, in memory or sparse.
        n_components: K, a share in (0, 1] (the sketch is doubled until it holds that much of the variance
            of all D directions), or None for min(N, D).
        n_oversamples: directions sketched beyond K.
        n_iter: power iterations; each multiplies by the samples twice and sharpens a slow spectrum.
        random_state: a seed (the same seed gives the same bits), a generator, which moves on, or None for
            seed 0. The global generator is left alone.
        whiten: mark the result as whitening and drop directions that are null to rounding.
        tol: share of the total variance that a better K-subspace may capture beyond this one; the sketch
            is doubled until that is proved. None takes the first sketch.

    Raises:
        ValueError: an argument is out of range, or the sketch does not fit in memory.

    Accuracy: what the certificate says: each variance with its error, proved with the stated probability.
    """
    check_whole(n_oversamples, "n_oversamples", 0)
    check_whole(n_iter, "n_iter", 0)
    check_positive(tol, "tol")
    problem = rows.problem
    n, d = problem.n_samples, len(problem.mean)
    n_components = as_components(n_components)
    check_count(n_components, n, d)
    generator = generator_from(random_state)
    most = min(n, d)
    wanted = (
        FIRST_SKETCH if isinstance(n_components, float) else most if n_components is None else n_components
    )
    width = max(1, min(most, int(wanted) + n_oversamples))
    with exact_products(problem.mean.device):
        while True:
            ritz = _sketch(rows, width, n_iter, generator)
            spare = n_oversamples if width < most else 0
            solved = _proved(rows, ritz, n_components, generator, spare)
            if solved is not None and (width == most or _accepted(solved, tol)):
                break
            width = min(most, 2 * width)
        dtype = component_dtype(problem.dtype)
        k = len(solved.spectrum)
        return assemble(solved, k, dtype=dtype, centred=problem.centred, whiten=whiten)


def range_finder(rows: Rows | Sparse, omega: Tensor, n_iter: int) -> Tensor:
    """Orthonormal rows (q, D) that span the leading directions of the samples, nearly.

    This is what `torch.svd_lowrank` does with the same Ω on the centred samples, but for its last SVD, which
    turns the vectors within their span. That one needs the centred copy; here every product is with `rows`.

    Args:
        rows: Xc (N, D).
        omega: Gaussian block, (D, q) for N ≥ D, else (N, q).
        n_iter: power iterations.

    Source: Halko, Martinsson & Tropp, SIAM Rev. 53(2), 2011, algorithms 4.4 and 5.1.
    """
    tall = len(omega) == len(rows.problem.mean)
    block = omega
    for step in range(2 * n_iter + (2 if tall else 1)):
        to_samples = tall == (step % 2 == 0)
        block = rows.scores(block.mT) if to_samples else rows.gather(block).mT
        block = torch.linalg.qr(block).Q
    return block.mT


def _sketch(rows: Rows | Sparse, width: int, n_iter: int, generator: torch.Generator) -> Ritz:
    """Ritz pairs of the covariance in the range of a fresh block.

    Raises:
        ValueError: it does not fit in memory.
    """
    n, d = rows.n_rows, len(rows.problem.mean)
    need, free = 32 * width * (n + d), free_memory(rows.problem.mean.device)  # four float64 copies
    if free is not None and need > free:
        raise ValueError(
            f"`n_components` takes a sketch of {width} directions, which needs {need / 2**30:,.1f} GiB, "
            f"{free / 2**30:,.1f} GiB is free; ask for fewer."
        )
    side = d if n >= d else n
    omega = gaussian(side, width, generator, rows.problem.mean.device)
    vectors = range_finder(rows, omega, n_iter)
    return rayleigh_ritz(vectors, rows.apply(vectors))


def _proved(
    rows: Rows | Sparse, ritz: Ritz, n_components: float | None, generator: torch.Generator, spare: int
) -> Solved | None:
    """K directions, certified; None where the sketch does not hold the share with `spare` directions left."""
    k = _count(rows, ritz, n_components, spare)
    if k is None:
        return None
    problem, noise = rows.problem, rows.noise
    bound = trace_bound(ritz, problem.total_variance, noise)
    if bound.below > 2 * trace_bound(ritz, 0.0, noise).below:  # else the rank is exhausted
        bound = probe(rows, ritz, generator, products=PROBE_PRODUCTS)
    upper = upper_values(ritz, bound.below, k + 1)
    precision = f"{problem.products} products, float64 sketch"
    return finish(
        rows, ritz, k, upper, bound.below, solver="randomized", precision=precision, bound_kind=bound.kind
    )


def _count(rows: Rows | Sparse, ritz: Ritz, n_components: float | None, spare: int) -> int | None:
    """K, or None where a share needs a larger sketch; by interlacing K can only come out too large.

    Raises:
        ValueError: all directions were sketched, and do not hold the share.
    """
    problem, width = rows.problem, len(ritz.values)
    if not isinstance(n_components, float):
        return width if n_components is None else n_components
    if problem.constant:
        return 0
    values = ritz.values.clamp_min(0)
    off = problem.error + rows.noise * values[0].item()
    try:
        k = kept(n_components, values, problem.total_variance, off, torch.full_like(values, off))
    except ValueError:  # more than these
        if spare == 0:
            raise
        return None
    return k if k + spare <= width else None


def _accepted(solved: Solved, tol: float | None) -> bool:
    """Whether no other directions capture more than `tol` beyond these, rounding aside."""
    beyond = (solved.error - solved.floor).sum().item()
    return tol is None or beyond <= tol * solved.total_variance.item()
